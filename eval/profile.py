"""How often a drafter's children are accepted, by depth and by rank among siblings: what the best fixed tree is made from.

Knows decoding; knows nothing of settings or files.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from draftsmith.eval.decode import Decoding, decode
from draftsmith.eval.drafters import Drafter
from draftsmith.eval.tree import Static
from draftsmith.models.target import Target


def spine(depth: int, width: int) -> Static:
    """Every node of the first branch has `width` children: 1 + depth · width nodes."""
    parents, node = [-1], 0
    for _ in range(depth):
        first = len(parents)
        parents += [node] * width
        node = first
    return Static(tuple(parents))


def rank_profile(
    target: Target, drafter: Drafter, prompts: Sequence[Sequence[int]], how: Decoding, depth: int, width: int
) -> list[list[float]]:
    """profile[d][r]: how often the child of rank r was accepted below a node of depth d, given that this node was.

    Measured by decoding with `spine`, so a node stands for all of its depth that is likeliest at every step; with the rule and at
    the temperature of `how`, whose shape is not used. Noise that makes a later rank better than an earlier one is taken off.
    """
    results = decode(target, drafter, prompts, replace(how, shape=spine(depth, width)))
    accepted = np.zeros((depth, width))
    reached = np.zeros(depth)
    for step in (step for result in results for step in result.trace):
        for d in range(len(step.hits)):
            reached[d] += 1
            if step.hits[d]:
                accepted[d, step.ranks[d]] += 1
    profile = np.minimum.accumulate(accepted / np.maximum(reached, 1)[:, None], axis=1)
    return [[float(share) for share in row] for row in profile]
