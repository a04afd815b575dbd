"""Hold what an engine drafted and accepted against what our decoder did on the same prompts. Knows numbers alone.

Both count as vLLM does: a verify without drafted tokens is none, the last one counts in full although its tokens are cut at the
cap, acceptance length is 1 + Σ accepted / verifies, and the rate at position k is the share of verifies that accepted k tokens or
more. Both sides decode the same prompts greedily, so they differ by rounding alone; differences are paired by prompt.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from draftsmith.eval.metrics import RESAMPLES, ratio

Step = list[int]  # drafted, accepted


@dataclass(frozen=True)
class Side:
    """tokens: the new ones of each prompt; steps: [drafted, accepted] of each of its verifies."""

    tokens: list[list[int]]
    steps: list[list[Step]]

    def per_prompt(self, of: Callable[[Step], float]) -> np.ndarray:
        return np.array([sum(of(step) for step in steps) for steps in self.steps], dtype=float)


def compare(ours: Side, theirs: Side, K: int) -> dict[str, Any]:
    """The two sides' numbers and `faults`, one line for each that differs by more than its sampling interval."""
    if len(ours.tokens) != len(theirs.tokens):
        raise ValueError(f"{len(ours.tokens)} prompts of ours, {len(theirs.tokens)} of theirs")
    same = sum(a == b for a, b in zip(ours.tokens, theirs.tokens, strict=True))
    pairs = [pair for a, b in zip(ours.steps, theirs.steps, strict=True) for pair in zip(a, b, strict=False)]
    most = sum(max(len(a), len(b)) for a, b in zip(ours.steps, theirs.steps, strict=True))
    found: dict[str, Any] = {
        "identical": [same, len(ours.tokens)],
        "equal_verifies": [sum(a == b for a, b in pairs), most],
        "ours": _numbers(ours, K),
        "theirs": _numbers(theirs, K),
    }
    faults = [] if same == len(ours.tokens) else [f"greedy tokens of {len(ours.tokens) - same} prompts differ"]
    if not (found["ours"]["drafts"] and found["theirs"]["drafts"]):
        faults.append(f"drafts: {found['ours']['drafts']} of ours, {found['theirs']['drafts']} of theirs")
    else:
        difference = found["difference"] = paired(ours, theirs, lambda step: step[1])
        if not difference["low"] <= 0 <= difference["high"]:
            faults.append(f"acceptance length differs by {_shown(difference)}")
        for k in range(K):
            difference = paired(ours, theirs, lambda step, k=k: step[1] > k)  # type: ignore[misc]
            if not difference["low"] <= 0 <= difference["high"]:
                faults.append(f"acceptance rate at position {k + 1} differs by {_shown(difference)}")
    return found | {"faults": faults}


def _numbers(side: Side, K: int) -> dict[str, Any]:
    drafts = side.per_prompt(lambda step: 1)
    length = {key: value if key == "count" else 1 + value for key, value in _accepted(side, drafts).items()}
    positions = []
    for k in range(K):
        reached = ratio(side.per_prompt(lambda step, k=k: step[1] > k), drafts)  # type: ignore[misc]
        positions.append(reached)
    return {"drafts": int(drafts.sum()), "length": length, "positions": positions}


def _accepted(side: Side, drafts: np.ndarray) -> dict[str, Any]:
    return dict(ratio(side.per_prompt(lambda step: step[1]), drafts))


def paired(ours: Side, theirs: Side, of: Callable[[Step], float], seed: int = 0) -> dict[str, float]:
    """Theirs − ours of Σ of(step) / verifies, with its 95 % interval: prompts are drawn anew, both sides' at once."""
    values = [(side.per_prompt(of), side.per_prompt(lambda step: 1)) for side in (theirs, ours)]
    count = len(ours.steps)
    weights = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    means = []
    for numerators, denominators in values:
        below = weights @ denominators
        means.append(np.divide(weights @ numerators, below, out=np.zeros(RESAMPLES), where=below > 0))
    low, high = np.percentile(means[0] - means[1], [2.5, 97.5])
    value = values[0][0].sum() / values[0][1].sum() - values[1][0].sum() / values[1][1].sum()
    return {"value": float(value), "low": float(low), "high": float(high)}


def _shown(interval: dict[str, float]) -> str:
    return f"{interval['value']:+.3f} ({interval['low']:+.3f} to {interval['high']:+.3f})"
