"""From verify traces to the metrics of docs/conventions.md, each with a 95 % bootstrap interval over prompts.

Sums are kept per prompt and ratios are taken last, so that a number over many prompts weighs every verify alike. Knows traces only.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from draftsmith.eval.decode import Verify
from draftsmith.eval.theory import expected_tokens

RESAMPLES = 1000
#: Where buckets of tokens begin: by the place in the answer, and by the length of the prompt. The last one is open.
POSITION_EDGES = (0, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
PROMPT_EDGES = (0, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)

Interval = dict[str, float | int]
Trace = Sequence[Verify]


@lru_cache(maxsize=32)
def resampled(count: int, seed: int = 0) -> np.ndarray:
    """[RESAMPLES, count]: how often each of `count` prompts is drawn in each bootstrap sample. Not to be written to."""
    weights = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
    weights.flags.writeable = False  # it is shared
    return weights


def interval(value: float, samples: np.ndarray, count: int) -> Interval:
    """A metric as the results hold it: the value and the middle 95 % of its bootstrap samples."""
    low, high = np.percentile(samples, [2.5, 97.5])
    return {"value": float(value), "low": float(low), "high": float(high), "count": int(count)}


def ratio(numerators: np.ndarray, denominators: np.ndarray, seed: int = 0) -> Interval | dict[str, float]:
    """Σ numerators / Σ denominators over prompts [N], and its bootstrap interval. {} where nothing was counted."""
    total = denominators.sum()
    if total == 0:
        return {}
    weights = resampled(len(numerators), seed)
    below = weights @ denominators
    samples = (weights @ numerators)[below > 0] / below[below > 0]
    return interval(numerators.sum() / total, samples, total)


def paired_ratio(above: np.ndarray, below: np.ndarray, seed: int = 0) -> Interval:
    """Σ above / Σ below over prompts [N, R] within each of R rounds, the median over these; the interval is bootstrapped over both.

    What disturbs a round disturbs both sides of its ratio.
    """
    count, rounds = above.shape
    weights = resampled(count, seed)
    drawn = np.random.default_rng(seed).integers(rounds, size=(RESAMPLES, rounds))
    ratios = (weights @ above) / (weights @ below)
    samples = np.median(np.take_along_axis(ratios, drawn, axis=1), axis=1)
    return interval(float(np.median(above.sum(0) / below.sum(0))), samples, count)


def _reached(k: int, verify: Verify) -> bool:
    return len(verify.hits) > k


def _accepted_at(k: int, verify: Verify) -> bool:
    return len(verify.hits) > k and verify.hits[k]


def _survived(k: int, verify: Verify) -> bool:
    return verify.accepted > k


def _overlap_at(k: int, verify: Verify) -> float:
    return verify.overlaps[k] if len(verify.overlaps) > k else 0.0


def per_prompt(traces: Iterable[Trace], of: Callable[[Verify], float]) -> np.ndarray:
    """[N]: the sum of `of` over the verifies of each prompt."""
    return np.array([sum(of(v) for v in trace) for trace in traces], dtype=float)


def _alpha(traces: Sequence[Trace]) -> dict[str, Any]:
    return ratio(per_prompt(traces, lambda v: sum(v.overlaps)), per_prompt(traces, lambda v: len(v.overlaps)))


def _tokens_per_verify(traces: Sequence[Trace]) -> dict[str, Any]:
    return ratio(per_prompt(traces, lambda v: v.emitted), per_prompt(traces, lambda v: 1))


def metrics(traces: Sequence[Trace], K: int) -> dict[str, Any]:
    """All metrics of one setting. traces: the verify steps of each prompt, at most K drafted tokens each.

    alpha: mean acceptance probability over drafted positions reached; alpha_by_depth[k]: over those reached at position k.
    acceptance_rate: Σ accepted / Σ drafted. n_alpha[k]: share of the verifies that reached position k in which it was accepted.
    survival[k]: share of all verifies in which positions 0 … k were. tokens_per_verify: Σ emitted / verifies.
    tokens_per_verify_iid: what alpha would give if positions were alike and independent. per_prompt: the sums that all of these are
    made of.
    """
    of = partial(per_prompt, traces)
    verifies, alpha, depths = of(lambda v: 1), _alpha(traces), range(K)
    result: dict[str, Any] = {
        "verifies": int(verifies.sum()),
        "tokens": int(of(lambda v: v.emitted).sum()),
        "alpha": alpha,
        "alpha_by_depth": [ratio(of(partial(_overlap_at, k)), of(partial(_reached, k))) for k in depths],
        "acceptance_rate": ratio(of(lambda v: v.accepted), of(lambda v: v.drafted)),
        "tokens_per_verify": _tokens_per_verify(traces),
        "n_alpha": [ratio(of(partial(_accepted_at, k)), of(partial(_reached, k))) for k in depths],
        "survival": [ratio(of(partial(_survived, k)), verifies) for k in depths],
        "per_prompt": sums(traces, K),
    }
    if alpha:
        result["tokens_per_verify_iid"] = expected_tokens(min(1.0, float(alpha["value"])), K)
    return result


def sums(traces: Sequence[Trace], K: int) -> dict[str, list[Any]]:
    """The sums of each prompt: one list per name, one entry per prompt; of `reached`, `accepted_at`, `survived` and `overlap_at`
    (accepted probability) the entry is a list over positions 0 … K − 1."""

    def column(of: Callable[[Verify], float]) -> list[int]:
        return [int(value) for value in per_prompt(traces, of)]

    def by_depth(of: Callable[[int, Verify], float]) -> list[list[float]]:
        return [list(row) for row in zip(*(per_prompt(traces, partial(of, k)).tolist() for k in range(K)), strict=True)]

    def counts(of: Callable[[int, Verify], float]) -> list[list[int]]:
        return [[int(value) for value in row] for row in by_depth(of)]

    return {
        "verifies": column(lambda v: 1),
        "tokens": column(lambda v: v.emitted),
        "drafted": column(lambda v: v.drafted),
        "accepted": column(lambda v: v.accepted),
        "reached": counts(_reached),
        "accepted_at": counts(_accepted_at),
        "survived": counts(_survived),
        "overlap_at": by_depth(_overlap_at),
    }


def by_position(answers: Sequence[Sequence[Trace]]) -> list[dict[str, Any]]:
    """alpha and tokens_per_verify of the verifies that began behind `from` (included) to `to` (excluded) tokens of an answer.

    answers: for each prompt the traces of its answers.
    """
    found: list[tuple[int, int, Trace]] = []
    for prompt, traces in enumerate(answers):
        for trace in traces:
            written = 0
            for verify in trace:
                found.append((bucket_of(written, POSITION_EDGES), prompt, [verify]))
                written += verify.emitted
    return _buckets(found, POSITION_EDGES, len(answers))


def by_prompt_length(answers: Sequence[Sequence[Trace]], lengths: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """alpha and tokens_per_verify of the answers to `from` (included) to `to` (excluded) tokens. lengths: of what each one
    answers."""
    found = [
        (bucket_of(length, PROMPT_EDGES), prompt, trace)
        for prompt, (traces, own) in enumerate(zip(answers, lengths, strict=True))
        for trace, length in zip(traces, own, strict=True)
    ]
    return _buckets(found, PROMPT_EDGES, len(answers))


def bucket_of(tokens: int, edges: Sequence[int]) -> int:
    """The number of the bucket that holds `tokens`."""
    return int(np.searchsorted(edges, tokens, side="right")) - 1


def _buckets(found: Sequence[tuple[int, int, Trace]], edges: Sequence[int], prompts: int) -> list[dict[str, Any]]:
    """found: (bucket, prompt, verifies). Buckets without a verify are left out."""
    parts: dict[int, list[list[Verify]]] = {}
    for bucket, prompt, verifies in found:
        parts.setdefault(bucket, [[] for _ in range(prompts)])[prompt].extend(verifies)
    return [
        {
            "from": edges[bucket],
            "to": edges[bucket + 1] if bucket + 1 < len(edges) else None,
            "prompts": sum(bool(trace) for trace in traces),
            "alpha": _alpha(traces),
            "tokens_per_verify": _tokens_per_verify(traces),
        }
        for bucket, traces in sorted(parts.items())
    ]
