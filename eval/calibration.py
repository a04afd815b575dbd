"""Is a head as sure as it should be? Its confidence in every drafted token, against the acceptance that followed.

Knows drafters and traces. Only a head that was trained with a confidence output (`eagle.NAME.confidence`) has one.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.eval.decode import Decoded
from draftsmith.eval.drafters import Committed, Drafter, EagleDrafter
from draftsmith.eval.metrics import ratio
from draftsmith.eval.sampling import Sampler
from draftsmith.eval.tree import Proposal, Shape
from draftsmith.models.eagle import EagleHead

BINS = 10


class WatchedDrafter(EagleDrafter):
    """An EAGLE head that keeps what it thought of each token of the chains it drafted.

    `seen[i][s][k]`: of the i-th prompt since it was made, at its verify s, the confidence in the token drafted at position k.
    """

    def __init__(self, head: EagleHead) -> None:
        super().__init__(head)
        self.seen: list[list[list[float]]] = []

    def begin(self, batch: int, capacity: int) -> None:
        super().begin(batch, capacity)
        self._active: list[list[list[float]]] = [[] for _ in range(batch)]
        self.seen += self._active

    def propose(self, committed: Committed, shape: Shape, sampler: Sampler) -> Proposal:
        self._thoughts: list[Tensor] = []
        proposal = super().propose(committed, shape, sampler)
        sure = proposal.tokens.shape[1] > 1
        if sure:
            self._thoughts.append(self.confidence())  # of the last token, which is not extended
        thoughts = torch.stack(self._thoughts, 1).tolist() if sure else [[] for _ in self._active]
        for row, size, thought in zip(self._active, proposal.sizes.tolist(), thoughts, strict=True):
            row.append(thought[: size - 1])
        return proposal

    def extend(self, tokens: Tensor, parents: Tensor, visible: Tensor, depth: int) -> Tensor:
        self._thoughts.append(self.confidence())  # the newest state is the one that `tokens` were drawn from
        return super().extend(tokens, parents, visible, depth)

    def keep(self, rows: Tensor) -> None:
        super().keep(rows)
        self._active = [self._active[row] for row in rows.tolist()]


def watched(drafter: Drafter) -> Drafter:
    """The same drafter, watched where it is a head that says how sure it is."""
    if isinstance(drafter, EagleDrafter) and drafter.head.confidence_head is not None:
        return WatchedDrafter(drafter.head)
    return drafter


def calibration(drafter: Drafter, decoded: Sequence[Decoded]) -> list[dict[str, Any]]:
    """Per tenth of confidence that occurs: its mean, and the mean acceptance probability Σ min(p, q) with its interval.

    decoded: the last that `drafter` drafted for. Empty for a drafter that is not watched.
    """
    if not isinstance(drafter, WatchedDrafter):
        return []
    prompts, sure, accepted = [], [], []
    for prompt, (result, seen) in enumerate(zip(decoded, drafter.seen[-len(decoded) :], strict=True)):
        for verify, thoughts in zip(result.trace, seen, strict=True):
            for thought, overlap in zip(
                thoughts, verify.overlaps, strict=False
            ):  # positions that were not reached say nothing
                prompts.append(prompt)
                sure.append(thought)
                accepted.append(overlap)
    place = np.minimum((np.array(sure) * BINS).astype(int), BINS - 1)
    made = []
    for tenth in sorted(set(place.tolist())):
        chosen = place == tenth
        own = np.array(prompts)[chosen]
        counts = np.bincount(own, minlength=len(decoded)).astype(float)
        sums = np.bincount(own, np.array(accepted)[chosen], minlength=len(decoded))
        made.append({"confidence": float(np.array(sure)[chosen].mean()), "accepted": ratio(sums, counts)})
    return made
