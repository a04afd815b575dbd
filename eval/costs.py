"""What a step costs: measured inside the decoder's own loop (`timing`), or stated for another machine.

Knows nothing of acceptance.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from draftsmith.errors import UserError
from draftsmith.eval.decode import Decoding
from draftsmith.eval.drafters import Committed, Drafter, NoDraft
from draftsmith.eval.sampling import Sampler
from draftsmith.eval.timing import Run, timed
from draftsmith.eval.tree import Dynamic, Proposal, Shape, Static, chain, chain_shape
from draftsmith.eval.tune_settings import StatedCosts
from draftsmith.models.target import Target

PLAIN, FILLER = "", "filler"  # the names under which decoding without drafts, and with idle ones, is timed


class Filler(Drafter):
    """Proposes the pending token over and over: what a verify of so many tokens costs when no model drafts them."""

    def propose(self, committed: Committed, shape: Shape, sampler: Sampler) -> Proposal:
        pending = torch.tensor([tokens[-1] for tokens in committed.tokens])
        return chain(pending[:, None].expand(-1, shape.nodes + 1))


@dataclass
class Timing:
    """Seconds per repetition [R]: of a mean verify's parts, and of what happens once per text: start (see `timing.Run`), of which
    prefill is the target's. lengths [R]: tokens of the prompts. nodes: that the target read per verify, on average."""

    draft: list[float] = field(default_factory=list)
    verify: list[float] = field(default_factory=list)
    rest: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    start: list[float] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)
    nodes: float = 1.0

    @property
    def cycle(self) -> np.ndarray:
        """[R]: a whole verify."""
        return np.array(self.draft) + self.forward

    @property
    def forward(self) -> np.ndarray:
        """[R]: a verify without the draft."""
        return np.array(self.verify) + np.array(self.rest)

    def note(self, run: Run, length: float, scale: float = 1.0) -> None:
        """One repetition, its seconds times `scale`."""
        cycle = run.cycle
        for values, seconds in (
            (self.draft, cycle.draft),
            (self.verify, cycle.verify),
            (self.rest, cycle.rest),
            (self.prefill, run.prefill),
            (self.start, run.start),
        ):
            values.append(scale * seconds)
        self.lengths.append(length)


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
    """Timings of each draft's shapes (`FILLER`: of a `Filler`) on `batch` of the texts at once, and of plain decoding.

    All settings take turns, `repetitions` times, and the texts as well. In every turn the same texts are decoded plainly too, and
    what is timed is scaled to the pace of the machine's median plain step: a slow or fast moment of it makes no setting dear or
    cheap. Each run is `verifies` verifies long, after a first one, or as many as the target's context has room for. sampler(shape):
    how it drafts and what is sampled. Raises UserError for a shape that leaves room for none.
    """
    keys: list[Key] = [(name, shape) for name, chosen in shapes.items() for shape in chosen]
    pairs: dict[Key, list[tuple[Run, Run, float]]] = {key: [] for key in keys}
    for turn in range(repetitions * len(keys)):
        name, shape = key = keys[turn % len(keys)]
        assert shape is not None
        fits = min(verifies, (target.context - shape.depth - 2) // (shape.depth + 1) - 1)
        if fits < 1:
            raise UserError(
                f"tune.K, tune.depth: {shape.depth} tokens ahead leave no room to time two verifies in {target.context} tokens of"
                " context; lower them"
            )
        tokens = (fits + 1) * (shape.depth + 1) + 1  # no text ends before the run does
        room = target.context - tokens - shape.depth
        some = [list(texts[(turn * batch + i) % len(texts)])[-room:] for i in range(batch)]
        sides: list[tuple[Drafter, Shape]] = [
            (NoDraft(), chain_shape(1)),
            (Filler() if name == FILLER else drafters[name], shape),
        ]
        plain, own = [
            timed(target, drafter, some, Decoding(drafted, sampler(drafted), tokens, turn, frozenset()), most=fits + 1)
            for drafter, drafted in sides
        ]
        pairs[key].append((plain, own, float(np.mean([len(text) for text in some]))))
    pace = float(np.median([plain.cycle.seconds for runs in pairs.values() for plain, _, _ in runs]))
    found: dict[Key, Timing] = {(PLAIN, None): Timing()}
    for key, runs in pairs.items():
        found[key] = Timing(nodes=float(np.mean([cycle.nodes for _, own, _ in runs for cycle in own.cycles[1:]])))
        for plain, own, length in runs:
            scale = pace / plain.cycle.seconds
            found[PLAIN, None].note(plain, length, scale)
            found[key].note(own, length, scale)
    return found


class Costs(Protocol):
    """What a planner asks of costs, all in seconds with one value per repetition [R]. KeyError: this was not measured."""

    def plain(self) -> np.ndarray:
        """One step of plain decoding."""

    def verify(self, name: str, nodes: int) -> np.ndarray:
        """The target's forward over `nodes` tokens of each sequence, and what the loop does besides drafting."""

    def draft(self, name: str, shape: Shape) -> np.ndarray:
        """One proposal."""

    def cycle(self, name: str, shape: Shape) -> np.ndarray:
        """One proposal of the whole shape and its verify."""

    def start(self, name: str, lengths: np.ndarray) -> np.ndarray:
        """[N, 1]: once per text, for prompts of so many tokens [N]: prefill of target and draft. PLAIN: of the target alone."""

    def table(self) -> list[dict[str, object]]:
        """JSON: what was measured or stated."""


class MeasuredCosts:
    """Costs at one batch size from `measure`. Between measured chain lengths and node counts they are interpolated.

    A draft's verifies are those that were timed with it. One that drafts less than it is asked for has none of so many tokens: its
    verifies are a `Filler`'s, or else those of all drafts.
    """

    def __init__(self, timings: dict[Key, Timing]) -> None:
        self.timings = timings
        self._plain = float(np.median(timings[PLAIN, None].cycle))
        one = float(np.median(timings[PLAIN, None].forward))
        by_nodes: dict[str, dict[int, list[np.ndarray]]] = {}
        for (name, shape), timing in timings.items():
            if shape is None or timing.nodes != shape.nodes + 1:
                continue
            for whose in (name, PLAIN):
                by_nodes.setdefault(whose, {}).setdefault(shape.nodes + 1, []).append(timing.forward)
        self._verify = {
            name: {1: np.full(1, one)} | {n: np.median(values, axis=0) for n, values in sorted(found.items())}
            for name, found in by_nodes.items()
        }

    def plain(self) -> np.ndarray:
        return np.full(1, self._plain)

    def verify(self, name: str, nodes: int) -> np.ndarray:
        for whose in (name, FILLER):
            with suppress(KeyError):
                return _between(self._verify[whose], nodes)
        return _between(self._verify[PLAIN], nodes)

    def cycle(self, name: str, shape: Shape) -> np.ndarray:
        timing = self.timings.get((name, shape))
        if timing is not None and timing.nodes == shape.nodes + 1:
            return timing.cycle
        return self.draft(name, shape) + self.verify(name, shape.nodes + 1)

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

    def start(self, name: str, lengths: np.ndarray) -> np.ndarray:
        """On the line through all of the draft's repetitions: what reads a prompt takes longer for a longer one."""
        own = [timing for (n, _), timing in self.timings.items() if n == name]
        seconds, measured = (np.concatenate([getattr(t, part) for t in own]) for part in ("start", "lengths"))
        line = np.polyfit(measured, seconds, 1 if np.ptp(measured) > 0 else 0)
        return np.polyval(line, lengths)[:, None]

    def table(self) -> list[dict[str, object]]:
        """JSON: each timing's median in milliseconds, at the common pace, and the range of its repetitions."""
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
    """`StatedCosts` as `Costs`: prefill is left out, and a draft step costs the same at every width.

    steps: how many forwards a draft needs whatever it drafts, by its name: Medusa heads one, prompt lookup none. Others: the depth.
    """

    def __init__(self, stated: StatedCosts, steps: Mapping[str, int]) -> None:
        self.stated, self._steps = stated, steps

    def plain(self) -> np.ndarray:
        return np.array([self.stated.target_step_ms / 1000])

    def verify(self, name: str, nodes: int) -> np.ndarray:
        known = {n: np.array([ms]) for n, ms in sorted(self.stated.verify_ms.items())}
        known.setdefault(1, np.array([self.stated.target_step_ms]))
        return (_between(dict(sorted(known.items())), nodes) + self.stated.overhead_ms) / 1000

    def draft(self, name: str, shape: Shape) -> np.ndarray:
        return np.array([self._steps.get(name, shape.depth) * self.stated.draft_step_ms / 1000])

    def cycle(self, name: str, shape: Shape) -> np.ndarray:
        return self.draft(name, shape) + self.verify(name, shape.nodes + 1)

    def start(self, name: str, lengths: np.ndarray) -> np.ndarray:
        return np.zeros((len(lengths), 1))

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
