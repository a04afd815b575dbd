"""Does the decoder emit the target's own law? The first token after a prompt, decoded many times, against p itself.

Knows decoding and one prompt. A finite sample of p differs from p: both distances come with what equal laws would show.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from draftsmith.eval.decode import Decoding, decode
from draftsmith.eval.drafters import Drafter
from draftsmith.eval.sampling import Sampler
from draftsmith.eval.tree import Shape, chain_shape
from draftsmith.models.target import Target

AT_ONCE = 250


@dataclass(frozen=True)
class FirstTokenLaw:
    """n draws against p. kl: KL(draws ‖ p) in nats; tv: ½ Σ |draws − p|; the expected values are those of n draws from p itself:
    about (outcomes − 1) / 2n for KL, ½ Σ_v √(2 p_v (1 − p_v) / π n) for TV."""

    draws: int
    outcomes: int
    kl: float
    kl_expected: float
    tv: float
    tv_expected: float


def first_token_law(
    target: Target,
    drafter: Drafter,
    prompt: Sequence[int],
    sampler: Sampler,
    draws: int,
    seed: int = 0,
    shape: Shape | None = None,
) -> FirstTokenLaw:
    """Decode the first token after `prompt` `draws` times with `drafter` (without a shape a chain of one, so that every draw is
    drafted, verified and accepted or replaced) and compare with the target's distribution after the same sampler."""
    with torch.inference_mode():
        logits = target.forward(torch.tensor([list(prompt)])).logits
        assert logits is not None
        logits[..., target.usable :] = float("-inf")  # as `decode` does: padding is no token
        p = sampler.probabilities(logits[:, -1])[0].double().numpy()
    counts = np.zeros(len(p))
    for first in range(0, draws, AT_ONCE):
        names = range(first, min(first + AT_ONCE, draws))
        results = decode(
            target,
            drafter,
            [prompt] * len(names),
            Decoding(shape or chain_shape(1), sampler, max_new_tokens=1, seed=seed),
            names=names,
        )
        for result in results:
            counts[result.tokens[0]] += 1
    share, seen = counts / draws, counts > 0
    outcomes = int((p > 0).sum())
    with np.errstate(divide="ignore"):
        kl = float((share[seen] * np.log(share[seen] / p[seen])).sum())
    return FirstTokenLaw(
        draws,
        outcomes,
        kl,
        (outcomes - 1) / (2 * draws),
        float(np.abs(share - p).sum() / 2),
        float(np.sqrt(2 * p * (1 - p) / (np.pi * draws)).sum() / 2),
    )
