"""What a step costs: measured inside the decoder's own loop, or stated for another machine.

A verify of the engine is: the draft proposes, the target reads the tree, the rest (acceptance, bookkeeping, cache). `Timed` wraps a
drafter and reads the clock where `decode` calls it anyway, so what is timed is the real loop, with the draft's and the target's
weights pushing each other out of the processor's caches as they do when it counts. Knows nothing of acceptance.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from draftsmith.eval.decode import Decoding, decode
from draftsmith.eval.drafters import Committed, Drafter, NoDraft
from draftsmith.eval.sampling import Sampler
from draftsmith.eval.tree import Dynamic, Proposal, Shape, Static, chain, chain_shape
from draftsmith.eval.tune_settings import StatedCosts
from draftsmith.models.target import Target

PLAIN, FILLER = "", "filler"  # the names under which decoding without drafts, and with idle ones, is timed


class _EnoughError(Exception):
    """Ends a timed run: the decoder itself stops only where texts end, and a batch's texts must all go on while it is timed."""


@dataclass
class Cycle:
    """One verify: seconds of the draft, of the target's forward, and of the rest. nodes: tokens read per row, the root included."""

    nodes: int
    draft: float
    verify: float = 0.0
    rest: float = 0.0


class Timed(Drafter):
    """A drafter and its clock: from `propose` to the target, to `observe`, to the next `propose`. Ends after `most` verifies."""

    def __init__(self, inner: Drafter, most: int) -> None:
        self.inner, self.taps, self.most_nodes = inner, inner.taps, inner.most_nodes
        self._most = most
        self.cycles: list[Cycle] = []
        self.first = 0.0  # when the first proposal was asked for
        self._mark = 0.0

    def begin(self, batch: int, capacity: int) -> None:
        self.inner.begin(batch, capacity)
        self.cycles = []

    def propose(self, committed: Committed, shape: Shape, sampler: Sampler) -> Proposal:
        started = time.perf_counter()
        if self.cycles:
            self.cycles[-1].rest = started - self._mark
        else:
            self.first = started
        if len(self.cycles) == self._most:
            raise _EnoughError
        proposal = self.inner.propose(committed, shape, sampler)
        self._mark = time.perf_counter()
        self.cycles.append(Cycle(proposal.tokens.shape[1], self._mark - started))
        return proposal

    def confidence(self) -> Tensor:
        return self.inner.confidence()

    def observe(self, logits: Tensor) -> None:
        now = time.perf_counter()
        self.cycles[-1].verify, self._mark = now - self._mark, now
        self.inner.observe(logits)

    def keep(self, rows: Tensor) -> None:
        self.inner.keep(rows)


class Filler(Drafter):
    """Proposes the pending token over and over: what a verify of so many tokens costs when no model drafts them."""

    def propose(self, committed: Committed, shape: Shape, sampler: Sampler) -> Proposal:
        pending = torch.tensor([tokens[-1] for tokens in committed.tokens])
        return chain(pending[:, None].expand(-1, shape.nodes + 1))


@dataclass
class Timing:
    """Seconds per repetition, each the median over a run's verifies. prefill: until the first draft is asked for; first: what the
    first draft, which reads the prompt, takes more than another. nodes: tokens that the target read per verify, on average."""

    draft: list[float] = field(default_factory=list)
    verify: list[float] = field(default_factory=list)
    rest: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    nodes: float = 0.0

    @property
    def cycle(self) -> np.ndarray:
        """[R]: a whole verify."""
        return np.array(self.draft) + np.array(self.verify) + np.array(self.rest)


Key = tuple[str, Shape | None]  # a draft's name and what it drafts; (PLAIN, None) is plain decoding


def measure(
    target: Target,
    drafters: Mapping[str, Drafter],
    shapes: Mapping[str, Sequence[Shape]],
    texts: Sequence[Sequence[int]],
    sampler: Callable[[Shape], Sampler],
    batch: int,
    repetitions: int,
    verifies: int = 8,
) -> dict[Key, Timing]:
    """Timings of plain decoding and of each draft's shapes (`FILLER`: of a `Filler`) on `batch` of the texts at once.

    All runs take turns, `repetitions` times. Each is `verifies` verifies long, after a first one. sampler(shape): how it drafts
    and what is sampled.
    """
    runs: list[Key] = [(PLAIN, None), *((name, shape) for name, chosen in shapes.items() for shape in chosen)]
    found = {key: Timing() for key in runs}
    idle = {PLAIN: NoDraft(), FILLER: Filler()}
    for repetition in range(repetitions):
        for key in runs:
            shape = key[1] or chain_shape(1)
            tokens = (verifies + 1) * (shape.depth + 1) + 1  # no text ends before the run does
            room = target.context - tokens - shape.depth
            some = [list(texts[(repetition * batch + i) % len(texts)])[-room:] for i in range(batch)]
            timed = Timed(idle[key[0]] if key[0] in idle else drafters[key[0]], verifies + 1)
            started = time.perf_counter()
            with suppress(_EnoughError):
                decode(
                    target,
                    timed,
                    some,
                    Decoding(
                        shape=shape, sampler=sampler(shape), max_new_tokens=tokens, eos_ids=frozenset(), seed=repetition
                    ),
                )
            _note(found[key], timed, timed.first - started)
    return found


def _note(timing: Timing, timed: Timed, prefill: float) -> None:
    cycles = timed.cycles[1:]
    timing.draft.append(draft := float(np.median([cycle.draft for cycle in cycles])))
    timing.verify.append(float(np.median([cycle.verify for cycle in cycles])))
    timing.rest.append(float(np.median([cycle.rest for cycle in cycles])))
    timing.prefill.append(prefill)
    timing.first.append(max(0.0, timed.cycles[0].draft - draft))
    timing.nodes = float(np.mean([cycle.nodes for cycle in cycles]))


class Costs(Protocol):
    """What a planner asks of costs, all in seconds with one value per repetition [R]. KeyError: this was not measured."""

    def plain(self) -> np.ndarray:
        """One step of plain decoding."""

    def verify(self, nodes: int) -> np.ndarray:
        """The target's forward over `nodes` tokens of each sequence, and what the loop does besides drafting."""

    def draft(self, name: str, shape: Shape) -> np.ndarray:
        """One proposal."""

    def start(self, name: str) -> np.ndarray:
        """Once per text: prefill, of target and draft. PLAIN: of the target alone."""

    def table(self) -> list[dict[str, object]]:
        """JSON: what was measured or stated."""


class MeasuredCosts:
    """Costs at one batch size from `measure`. Between measured chain lengths and node counts they are interpolated."""

    def __init__(self, timings: dict[Key, Timing]) -> None:
        self.timings = timings
        by_nodes: dict[int, list[np.ndarray]] = {}
        for (_, shape), timing in timings.items():
            if shape is None or timing.nodes == shape.nodes + 1:  # the others drafted less than they were asked for
                by_nodes.setdefault(1 if shape is None else shape.nodes + 1, []).append(
                    np.array(timing.verify) + np.array(timing.rest)
                )
        self._verify = {nodes: np.median(values, axis=0) for nodes, values in sorted(by_nodes.items())}

    def plain(self) -> np.ndarray:
        return self.timings[PLAIN, None].cycle

    def verify(self, nodes: int) -> np.ndarray:
        return _between(self._verify, nodes)

    def draft(self, name: str, shape: Shape) -> np.ndarray:
        if (name, shape) in self.timings:
            return np.array(self.timings[name, shape].draft)
        chains = {
            s.nodes: np.array(t.draft)
            for (n, s), t in self.timings.items()
            if n == name and isinstance(s, Static) and s.nodes == s.depth
        }
        if isinstance(shape, Static) and shape.nodes == shape.depth:
            return _between(chains, shape.nodes)
        # A dynamic tree: the first level is a chain's first step, each further one costs what it did in the tree that was timed.
        for (n, other), timing in self.timings.items():
            same = n == name and isinstance(other, Dynamic) and isinstance(shape, Dynamic)
            if same and other.width == shape.width and other.depth > 1:  # type: ignore[union-attr]
                level = (np.array(timing.draft) - chains[1]) / (other.depth - 1)  # type: ignore[union-attr]
                return chains[1] + (shape.depth - 1) * level
        raise KeyError(f"{name}, {shape}")

    def start(self, name: str) -> np.ndarray:
        prefill = np.median([timing.prefill for timing in self.timings.values()], axis=0)
        firsts = [timing.first for (n, _), timing in self.timings.items() if n == name]
        return prefill + (np.median(firsts, axis=0) if firsts and name != PLAIN else 0.0)

    def table(self) -> list[dict[str, object]]:
        """JSON: each timing's median in milliseconds and the range of its repetitions."""
        rows: list[dict[str, object]] = []
        for (name, shape), timing in self.timings.items():
            parts = {
                "draft_ms": timing.draft,
                "verify_ms": timing.verify,
                "rest_ms": timing.rest,
                "prefill_ms": timing.prefill,
            }
            rows.append(
                {
                    "draft": name or "plain",
                    "tree": describe(shape) if shape else "plain",
                    "nodes": round(timing.nodes, 2),
                }
                | {part: _spread(values) for part, values in parts.items()}
            )
        return rows


class GivenCosts:
    """`StatedCosts` as `Costs`: prefill is left out, a draft step costs the same at every width, and prompt lookup is free."""

    def __init__(self, stated: StatedCosts, free: frozenset[str] = frozenset({"prompt-lookup"})) -> None:
        self.stated, self._free = stated, free

    def plain(self) -> np.ndarray:
        return np.array([self.stated.target_step_ms / 1000])

    def verify(self, nodes: int) -> np.ndarray:
        known = {n: np.array([ms]) for n, ms in sorted(self.stated.verify_ms.items())}
        known.setdefault(1, np.array([self.stated.target_step_ms]))
        return (_between(dict(sorted(known.items())), nodes) + self.stated.overhead_ms) / 1000

    def draft(self, name: str, shape: Shape) -> np.ndarray:
        return np.array([0.0 if name in self._free else shape.depth * self.stated.draft_step_ms / 1000])

    def start(self, name: str) -> np.ndarray:
        return np.zeros(1)

    def table(self) -> list[dict[str, object]]:
        """JSON: what was stated."""
        return [self.stated.model_dump(mode="json")]


def _between(known: dict[int, np.ndarray], at: int) -> np.ndarray:
    """Linear interpolation between the nearest known numbers (ascending keys). Raises KeyError outside of them."""
    numbers = list(known)
    if not numbers or not numbers[0] <= at <= numbers[-1]:
        raise KeyError(at)
    above = next(i for i, number in enumerate(numbers) if number >= at)
    if numbers[above] == at:
        return known[at]
    low, high = numbers[above - 1], numbers[above]
    share = (at - low) / (high - low)
    return (1 - share) * known[low] + share * known[high]


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    values = 1000 * np.array(seconds)
    return {"value": float(np.median(values)), "low": float(values.min()), "high": float(values.max())}


def describe(shape: Shape) -> str:
    """A shape's name in tables: "chain of 5", "static tree of 31, depth 6", "dynamic tree of 63, width 8, depth 6"."""
    if isinstance(shape, Dynamic):
        sharp = (
            "" if shape.confidence_temperature == 1 else f", confidence temperature {shape.confidence_temperature:g}"
        )
        return f"dynamic tree of {shape.budget}, width {shape.width}, depth {shape.depth}{sharp}"
    if shape.nodes == shape.depth:
        return f"chain of {shape.depth}"
    return f"static tree of {shape.nodes}, depth {shape.depth}"
