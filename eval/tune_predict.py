"""What a setting is predicted to be worth: candidates to try, their speed from recordings and costs, and thresholds from both.

Pure arithmetic over `replay.Trace` and `costs.Costs`: decodes nothing, times nothing.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from draftsmith.eval.costs import PLAIN, Costs, describe
from draftsmith.eval.metrics import Interval, paired_ratio, ratio
from draftsmith.eval.replay import Replayed, Trace, profile, replay
from draftsmith.eval.tree import Dynamic, Shape, chain_shape, optimal_shape
from draftsmith.eval.tune_settings import TuneSettings

RANKS = 16  # of a static tree's node at most; at a temperature above 0 as many as were sampled
TRIAL_COST = 0.02  # the share of time that trying speculation again may cost while it does not pay
SURE = 3.0  # standard errors between the window's usual acceptance and break-even
WINDOWS = (50, 1000)


@dataclass(frozen=True)
class Candidate:
    """A draft, what it drafts, and whether its tokens are sampled from q (else its likeliest)."""

    draft: str
    shape: Shape
    sampled: bool

    @property
    def family(self) -> str:
        """ "chain", "static" or "dynamic"."""
        if isinstance(self.shape, Dynamic):
            return "dynamic"
        return "chain" if self.shape.nodes == self.shape.depth else "static"

    def about(self) -> dict[str, Any]:
        """JSON."""
        shape = self.shape
        entry: dict[str, Any] = {
            "draft": self.draft,
            "tree": describe(shape),
            "family": self.family,
            "K": shape.depth,
            "nodes": shape.nodes,
            "drafting": "sampled" if self.sampled else "greedy",
        }
        if isinstance(shape, Dynamic):
            entry |= {"width": shape.width, "confidence_temperature": shape.confidence_temperature}
        elif self.family == "static":
            entry |= {"parents": list(shape.parents)}
        return entry


def candidates(draft: str, trace: Trace, settings: TuneSettings) -> Iterator[Candidate]:
    """Everything that this recording can score: chains of every length, the best static tree of each budget, dynamic trees."""
    hot = trace.accept is not None
    for K in range(1, min(settings.K, trace.depth) + 1):
        yield from (Candidate(draft, chain_shape(K), sampled) for sampled in ((True, False) if hot else (False,)))
    if not trace.grows:
        return
    depth = min(settings.depth, trace.depth)
    for sampled in (True, False) if hot else (False,):
        shares = profile(trace, RANKS, sampled)[:depth]
        for budget in settings.budgets:
            shape = optimal_shape(shares, budget)
            if shape.nodes == budget and shape.depth < budget:
                yield Candidate(draft, shape, sampled)
    for width, sharpness in trace.places:
        for deep in range(2, depth + 1):
            most = width + (deep - 1) * width**2
            yield from (
                Candidate(draft, Dynamic(width, deep, budget, sharpness), False)
                for budget in settings.budgets
                if budget <= most
            )


@dataclass(frozen=True)
class Prediction:
    """Of one candidate on N texts. speculative, plain [N, R]: seconds of each text's verifies, or plain steps, by repetition of the
    costs; start, start_plain [N, 1]: of what comes before. tokens_per_verify and speed-ups carry 95 % intervals, bootstrapped over
    texts (and repetitions)."""

    candidate: Candidate
    replayed: Replayed
    speculative: np.ndarray
    plain: np.ndarray
    start: np.ndarray
    start_plain: np.ndarray

    @property
    def tokens_per_verify(self) -> Interval | dict[str, float]:
        return ratio(self.replayed.tokens.astype(float), self.replayed.verifies)

    def speedup(self, texts: Sequence[int] | np.ndarray | None = None, whole: bool = True) -> Interval:
        """Over plain decoding, of these texts (default: all); whole: prefill included, as a clock would have it."""
        rows = np.arange(len(self.plain)) if texts is None else np.asarray(texts)
        plain, speculative = self.plain[rows], self.speculative[rows]
        if whole:
            plain, speculative = plain + self.start_plain[rows], speculative + self.start[rows]
        return paired_ratio(np.broadcast_to(plain, speculative.shape), speculative)

    def point(self, whole: bool) -> float:
        """The value of `speedup` for all texts, without its interval."""
        plain, speculative = self.plain.sum(0), self.speculative.sum(0)
        if whole:
            plain, speculative = plain + self.start_plain.sum(0), speculative + self.start.sum(0)
        return float(np.median(plain / speculative))


def predict(candidate: Candidate, trace: Trace, costs: Costs) -> Prediction:
    """Raises KeyError where the costs of this candidate are not known."""
    replayed = replay(trace, candidate.shape, candidate.sampled)
    if trace.grows:
        speculative = replayed.verifies[:, None] * costs.cycle(candidate.draft, candidate.shape)
    else:  # what was found decides how much is verified
        draft = costs.draft(candidate.draft, candidate.shape)
        sizes = np.minimum(trace.sizes, candidate.shape.nodes)
        speculative = sum(
            (replayed.visits * (sizes == size)).sum(1)[:, None] * (draft + costs.verify(candidate.draft, int(size) + 1))
            for size in np.unique(sizes)
        )
    plain = replayed.tokens[:, None] * costs.plain()
    start, start_plain = (costs.start(name, trace.prompts) for name in (candidate.draft, PLAIN))
    return Prediction(candidate, replayed, speculative, plain, start, start_plain)


def rank(traces: Mapping[str, Trace], costs: Costs, settings: TuneSettings, whole: bool = True) -> list[Prediction]:
    """All candidates whose costs are known, the fastest first; of equals the one with fewer nodes."""
    found = []
    for name, trace in traces.items():
        for candidate in candidates(name, trace, settings):
            try:
                found.append(predict(candidate, trace, costs))
            except KeyError:
                continue
    return sorted(found, key=lambda p: (-p.point(whole), p.candidate.shape.nodes))


def pays(interval: Interval) -> bool:
    """Faster than plain decoding, with the whole interval."""
    return interval["low"] > 1.0


def runtime_rules(prediction: Prediction, costs: Costs, most_temperature: float, most_batch: int) -> dict[str, Any]:
    """The fields of `gate.SpeculationGate` for a setting, from its costs and from how its acceptance scatters.

    break_even: a verify of cost v (in plain steps) must emit v tokens, of which v − 1 are accepted ones. window: so many verifies
    that their usual mean stands `SURE` standard errors above that. retry_after: the plain steps of which a window of verifies that
    accept nothing is `TRIAL_COST`.
    """
    replayed, shape = prediction.replayed, prediction.candidate.shape
    plain = float(np.median(costs.plain()))
    cost = float(np.median(prediction.speculative.sum(0))) / float(replayed.verifies.sum()) / plain
    accepted = float(replayed.accepted.sum() / replayed.verifies.sum())
    gap = accepted - (cost - 1)
    scatter = math.sqrt(max(float(replayed.squares.sum() / replayed.verifies.sum()) - accepted**2, 0.0))
    window = WINDOWS[1] if gap <= 0 else math.ceil((SURE * scatter / gap) ** 2)
    window = min(max(window, WINDOWS[0]), WINDOWS[1])
    return {
        "most_temperature": most_temperature,
        "most_batch": most_batch,
        "break_even": max(0.0, cost - 1) / shape.depth,
        "window": window,
        "retry_after": math.ceil(window * max(0.0, cost - 1) / TRIAL_COST),
    }
