"""Timing for `make bench-decode`: sides in turn in one process, seconds inside model forwards, costs in plain target steps."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from draftsmith.eval.decode import Decoded, Decoding, decode
from draftsmith.eval.drafters import Drafter, EagleDrafter, LMDrafter
from draftsmith.eval.sampling import Sampler
from draftsmith.eval.timing import Run, timed
from draftsmith.eval.tree import Shape
from draftsmith.models.target import Target


class ForwardTimes:
    """The seconds of every call of these (owner, method) pairs, nested ones once."""

    def __init__(self, *methods: tuple[Any, str]) -> None:
        self.calls: list[float] = []
        self._methods, self._inside = methods, False

    def __enter__(self) -> "ForwardTimes":
        for owner, name in self._methods:
            setattr(owner, name, self._timed(getattr(owner, name)))
        return self

    def __exit__(self, *_error: object) -> None:
        for owner, name in self._methods:
            delattr(owner, name)

    def _timed(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return inner(*args, **kwargs)
            self._inside, started = True, time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self._inside = False
                self.calls.append(time.perf_counter() - started)

        return timed


def forwards_of(drafter: Drafter) -> list[tuple[Any, str]]:
    """The methods of a drafter's model that run it."""
    if isinstance(drafter, LMDrafter):
        return [(drafter.model, "forward"), (drafter.model, "head")]
    assert isinstance(drafter, EagleDrafter)
    return [(drafter.head, name) for name in ("fuse", "step", "logits")]


def ours(target: Target, drafter: Drafter, text: list[int], shape: Shape, tokens: int) -> Decoded:
    """One prompt, greedily, without an end before the cap."""
    return decode(target, drafter, [text], greedily(shape, tokens))[0]


def greedily(shape: Shape, tokens: int) -> Decoding:
    return Decoding(shape, Sampler(0.0), tokens, eos_ids=frozenset())


def transformers_greedy(target: Target, text: list[int], tokens: int, assistant: Any = None) -> list[int]:
    """The same by `generate`, plain or assisted."""
    options: dict[str, Any] = {"assistant_model": assistant} if assistant is not None else {}
    out = target.model.generate(
        torch.tensor([text]),
        attention_mask=torch.ones(1, len(text), dtype=torch.long),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
        **options,
    )
    return out[0, len(text) :].tolist()


def paired(
    texts: list[list[int]], sides: dict[str, Callable[[list[int]], list[int]]], rounds: int = 2
) -> dict[str, np.ndarray]:
    """Seconds of each side per prompt (the best of `rounds`), the sides in turn. Raises if their tokens differ."""
    best = {name: np.full(len(texts), np.inf) for name in sides}
    for _ in range(rounds):
        for i, text in enumerate(texts):
            outputs = []
            for name, run in sides.items():
                started = time.perf_counter()
                outputs.append(run(text))
                best[name][i] = min(best[name][i], time.perf_counter() - started)
            if any(output != outputs[0] for output in outputs):
                raise RuntimeError(f"prompt {i}: {list(sides)} give different tokens")
    return best


def watched(target: Target, drafter: Drafter, text: list[int], shape: Shape, tokens: int) -> Run:
    """`ours` with a stopwatch."""
    return timed(target, drafter, [text], greedily(shape, tokens))


def pace(run: Run) -> float:
    """Seconds per token after the first verify, so without prefill."""
    return sum(cycle.seconds for cycle in run.cycles[1:]) / sum(step.emitted for step in run.results[0].trace[1:])


class Costs:
    """Seconds of one target forward over n nodes, measured in turn with the runs that they are to explain: same process, same
    threads, and as many tokens in the cache as those runs have half-way."""

    def __init__(self, target: Target, sizes: Sequence[int]) -> None:
        self._target = target
        self.seconds: dict[int, list[float]] = {n: [] for n in sizes}

    @torch.inference_mode()
    def measure(self, context: int, turns: int = 3) -> None:
        """One untimed turn over all sizes, then `turns` timed ones."""
        cache = self._target.new_cache(1, context + max(self.seconds))
        ids = torch.arange(context)[None] % self._target.usable
        self._target.forward(ids, cache=cache, want_logits=False)
        cache.set_lengths(torch.tensor([context]))
        for turn in range(turns + 1):
            for n, found in self.seconds.items():
                started = time.perf_counter()
                self._target.forward(torch.full((1, n), 7), cache=cache)
                if turn:
                    found.append(time.perf_counter() - started)

    def of(self, nodes: int) -> float:
        """Median seconds; between two measured sizes, on the line between them."""
        sizes = sorted(self.seconds)
        return float(np.interp(nodes, sizes, [np.median(self.seconds[n]) for n in sizes]))

    def verify_cost(self, nodes: int) -> float:
        """In forwards over one token."""
        return self.of(nodes) / self.of(1)


@dataclass(frozen=True)
class Prediction:
    """tokens_per_verify / (verify_cost + proposal), both costs in plain target steps. A proposal is all that the drafter does for
    one verify: its first step reads every token that the last verify accepted, the others one level of the tree each."""

    tokens_per_verify: float
    verify_cost: float
    proposal: float

    @property
    def speedup(self) -> float:
        return self.tokens_per_verify / (self.verify_cost + self.proposal)


def predict(runs: Sequence[Run], costs: Costs, nodes: int) -> Prediction:
    """For a tree of `nodes` (the root included) from what was drafted and accepted in these runs."""
    tau = float(np.mean([step.emitted for run in runs for step in run.results[0].trace[1:]]))
    proposal = float(np.median([cycle.draft for run in runs for cycle in run.cycles[1:]]))
    return Prediction(tau, costs.verify_cost(nodes), proposal / costs.of(1))
