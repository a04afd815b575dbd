"""Decoding with a stopwatch: one account of a run's seconds, for what measures a speed-up and for what predicts one.

A run is its prefill and its verifies, and a verify is: the draft proposes, the target reads the tree, the rest (acceptance,
bookkeeping, cache). `Stopwatch` wraps a drafter and reads the clock where `decode` calls it anyway: what is timed is the real loop,
with the draft's and the target's weights pushing each other out of the processor's caches, and the parts add up to the whole. They
are averaged by means: a long text takes the sum of its verifies, stalls included, and a median would leave those out.

On a machine that does other work too, the seconds of two runs compare only if they lie next to each other: plain and speculative
decoding take turns on every prompt, and ratios are taken within a turn. Knows nothing of domains or files.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
from torch import Tensor

from draftsmith.eval.decode import Decoded, Decoding, decode
from draftsmith.eval.drafters import Committed, Drafter, NoDraft
from draftsmith.eval.metrics import Interval, interval, paired_ratio, ratio, resampled
from draftsmith.eval.sampling import Sampler
from draftsmith.eval.settings import EvalSettings
from draftsmith.eval.tree import Proposal, Shape
from draftsmith.models.target import Target

ROUNDS = 2
FEWEST = 2  # prompts that are timed however long they take: one has no interval


class _EnoughError(Exception):
    """Ends a timed run: the decoder itself stops only where texts end, and a batch's texts must all go on while it is timed."""


@dataclass
class Cycle:
    """One verify: seconds of the draft, of the target's forward, and of the rest. nodes: tokens read per row, the root included."""

    nodes: int
    draft: float
    verify: float = 0.0
    rest: float = 0.0

    @property
    def seconds(self) -> float:
        return self.draft + self.verify + self.rest


@dataclass(frozen=True)
class Run:
    """One call of `decode`. prefill: seconds until the first draft is asked for; results: none where it was ended early."""

    prefill: float
    cycles: list[Cycle]
    results: list[Decoded]

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.prefill + sum(cycle.seconds for cycle in self.cycles)

    @property
    def cycle(self) -> Cycle:
        """The mean verify but for the first: its draft reads the prompt as well, and what a text's first forward takes more than
        another counts once, however many verifies share it. nodes: of the widest."""
        later = self.cycles[1:] or self.cycles
        draft, verify, rest = (
            float(np.mean([getattr(c, part) for c in later])) for part in ("draft", "verify", "rest")
        )
        return Cycle(max(c.nodes for c in self.cycles), draft, verify, rest)

    @property
    def start(self) -> float:
        """What happens once: prefill, and what the first verify takes more than later ones of as many nodes."""
        first, *later = self.cycles
        alike = [cycle.seconds for cycle in later if cycle.nodes == first.nodes]
        return self.prefill + first.seconds - float(np.mean(alike or [first.seconds]))


class Stopwatch(Drafter):
    """A drafter and its clock: from `propose` to the target, to `observe`, to the next `propose`. Ends after `most` verifies."""

    def __init__(self, inner: Drafter, most: int | None = None) -> None:
        self.inner, self.taps, self.most_nodes = inner, inner.taps, inner.most_nodes
        self._most, self._mark = most, 0.0
        self.cycles: list[Cycle] = []
        self.first = 0.0  # when the first proposal was asked for

    def begin(self, batch: int, capacity: int) -> None:
        self.inner.begin(batch, capacity)

    def propose(self, committed: Committed, shape: Shape, sampler: Sampler) -> Proposal:
        started = perf_counter()
        if self.cycles:
            self.end(started)
        else:
            self.first = started
        if len(self.cycles) == self._most:
            raise _EnoughError
        proposal = self.inner.propose(committed, shape, sampler)
        self._mark = perf_counter()
        self.cycles.append(Cycle(proposal.tokens.shape[1], self._mark - started))
        return proposal

    def end(self, now: float) -> None:
        """The newest verify is over."""
        self.cycles[-1].rest = now - self._mark

    def confidence(self) -> Tensor:
        return self.inner.confidence()

    def observe(self, logits: Tensor) -> None:
        now = perf_counter()
        self.cycles[-1].verify, self._mark = now - self._mark, now
        self.inner.observe(logits)

    def keep(self, rows: Tensor) -> None:
        self.inner.keep(rows)


def timed(
    target: Target,
    drafter: Drafter,
    texts: Sequence[Sequence[int]],
    how: Decoding,
    names: Sequence[int] | None = None,
    most: int | None = None,
) -> Run:
    """Decode these texts together, to their ends or for `most` verifies."""
    watch, results = Stopwatch(drafter, most), list[Decoded]()
    started = perf_counter()
    with suppress(_EnoughError):
        results = decode(target, watch, texts, how, names=names)
        watch.end(perf_counter())
    return Run(watch.first - started, watch.cycles, results)


@dataclass
class Speed:
    """Plain decoding and a draft's in turn: for each timed prompt one run per round."""

    plain: list[list[Run]] = field(default_factory=list)
    drafted: list[list[Run]] = field(default_factory=list)

    def speedup(self) -> Interval:
        """Ratio of the total times per token, plain over speculative, prefill included."""
        plain, drafted = (
            np.array([[run.seconds / len(run.results[0].tokens) for run in rounds] for rounds in side])
            for side in (self.plain, self.drafted)
        )
        return paired_ratio(plain, drafted)

    def metrics(self, tokens: np.ndarray, verifies: np.ndarray, K: int) -> dict[str, Any]:
        """speedup, draft_cost, verify_cost and speedup_predicted = tokens_per_verify / (verify_cost + K · draft_cost), whose
        interval joins those of its parts. Costs are of forwards and proposals alone, without prefill and the rest of a verify.

        tokens, verifies: sums of each decoded prompt, timed or not.
        """

        def each(side: list[list[Run]], part: str) -> np.ndarray:
            return np.array([np.mean([getattr(run.cycle, part) for run in rounds]) for rounds in side])

        plain, verify, draft = each(self.plain, "verify"), each(self.drafted, "verify"), each(self.drafted, "draft") / K
        weights, drawn = resampled(len(tokens), 1), resampled(len(plain), 2)
        faster = (weights @ tokens) / (weights @ verifies)
        slower = (drawn @ (verify + K * draft)) / (drawn @ plain)
        value = tokens.sum() / verifies.sum() * plain.sum() / (verify + K * draft).sum()
        measured: dict[str, dict[str, Any]] = {
            "speedup": self.speedup(),
            "draft_cost": ratio(draft, plain),
            "verify_cost": ratio(verify, plain),
            "speedup_predicted": interval(value, faster / slower, len(plain)),
        }
        return {name: entry | {"count": len(plain)} for name, entry in measured.items()}


def measured_speed(
    target: Target, drafter: Drafter, texts: Sequence[list[int]], settings: EvalSettings, how: Decoding
) -> Speed:
    """Decode prompts one at a time, plainly and with the drafter in turn, ROUNDS times each.

    Ends after `timed_prompts` prompts, or sooner when `timed_seconds` are over and FEWEST prompts are done.
    """
    speed, begun = Speed(), perf_counter()
    for number, text in enumerate(texts[: settings.timed_prompts]):
        if number >= FEWEST and perf_counter() - begun > settings.timed_seconds:
            break
        sides = [
            [timed(target, side, [text], how, names=[number]) for side in (NoDraft(), drafter)] for _ in range(ROUNDS)
        ]
        speed.plain.append([plain for plain, _ in sides])
        speed.drafted.append([drafted for _, drafted in sides])
    return speed
