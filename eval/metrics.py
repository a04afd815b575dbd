"""From verify traces to the metrics of docs/conventions.md, each with a 95 % bootstrap interval over prompts.

Sums are kept per prompt and ratios are taken last, so that a number over many prompts weighs every verify alike. Knows traces only.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from draftsmith.eval.decode import Verify
from draftsmith.eval.theory import expected_tokens

RESAMPLES = 1000

Interval = dict[str, float | int]


def ratio(numerators: np.ndarray, denominators: np.ndarray, seed: int = 0) -> Interval | dict[str, float]:
    """Σ numerators / Σ denominators over prompts [N], and its bootstrap interval. {} where nothing was counted."""
    total = denominators.sum()
    if total == 0:
        return {}
    rng = np.random.default_rng(seed)
    weights = rng.multinomial(len(numerators), np.full(len(numerators), 1 / len(numerators)), size=RESAMPLES)
    below = weights @ denominators
    samples = (weights @ numerators)[below > 0] / below[below > 0]
    low, high = np.percentile(samples, [2.5, 97.5])
    return {"value": float(numerators.sum() / total), "low": float(low), "high": float(high), "count": int(total)}


def _reached(k: int, verify: Verify) -> bool:
    return len(verify.hits) > k


def _accepted_at(k: int, verify: Verify) -> bool:
    return len(verify.hits) > k and verify.hits[k]


def _survived(k: int, verify: Verify) -> bool:
    return verify.accepted > k


def metrics(traces: Sequence[Sequence[Verify]], K: int) -> dict[str, object]:
    """All metrics of one setting. traces: the verify steps of each prompt, at most K drafted tokens each.

    alpha: mean acceptance probability over drafted positions reached. acceptance_rate: Σ accepted / Σ drafted. n_alpha[k]: share of
    the verifies that reached position k in which it was accepted. survival[k]: share of all verifies in which positions 0 … k
    were. tokens_per_verify: Σ emitted / verifies. tokens_per_verify_iid: what alpha would give if positions were alike and
    independent.
    """

    def per_prompt(of: Callable[[Verify], float]) -> np.ndarray:
        return np.array([sum(of(v) for v in trace) for trace in traces], dtype=float)

    verifies = per_prompt(lambda v: 1)
    alpha = ratio(per_prompt(lambda v: sum(v.overlaps)), per_prompt(lambda v: len(v.overlaps)))
    result: dict[str, object] = {
        "verifies": int(verifies.sum()),
        "tokens": int(per_prompt(lambda v: v.emitted).sum()),
        "alpha": alpha,
        "acceptance_rate": ratio(per_prompt(lambda v: v.accepted), per_prompt(lambda v: v.drafted)),
        "tokens_per_verify": ratio(per_prompt(lambda v: v.emitted), verifies),
        "n_alpha": [ratio(per_prompt(partial(_accepted_at, k)), per_prompt(partial(_reached, k))) for k in range(K)],
        "survival": [ratio(per_prompt(partial(_survived, k)), verifies) for k in range(K)],
    }
    if alpha:
        result["tokens_per_verify_iid"] = expected_tokens(min(1.0, float(alpha["value"])), K)
    return result
