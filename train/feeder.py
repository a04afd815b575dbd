"""Which rows every step takes, and reading this rank's part of them. Knows sources of rows; knows no objective."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from draftsmith.data.batches import Batch, length_buckets
from draftsmith.errors import UserError
from draftsmith.train.settings import TrainSettings

ROW_ERRORS = (UserError, OSError, ValueError, SafetensorError)  # what a row may raise and be left out for


class Source(Protocol):
    """Where rows come from: a cache on disk, the target at work, the draft's own continuations."""

    lengths: np.ndarray  # int64 [rows], tokens of each

    def batch(self, indices: Sequence[int]) -> Batch:
        """Some rows with all that their objective needs, padded."""
        ...


@runtime_checkable
class Stateful(Protocol):
    """A source whose batches depend on the step and on what happened before: checkpoints keep its tensors."""

    def begin(self, step: int) -> None:
        """Optimiser step `step`, counted from 0, reads its rows next. Called on every rank, between the same steps of all."""
        ...

    def state(self) -> dict[str, Tensor]:
        """All that a later `begin` does not bring back, on the CPU."""
        ...

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Put back what `state` gave."""
        ...


def stateful(source: Any) -> Stateful | None:
    """The stateful one among a source and those that it wraps, each as its attribute `source`."""
    while source is not None and not isinstance(source, Stateful):
        source = getattr(source, "source", None)
    return source


def batch_plan(lengths: np.ndarray, settings: TrainSettings, seed: int) -> list[list[list[int]]]:
    """Every optimiser step's micro-batches of row numbers, fixed by the seed: epochs of bucketed rows until the token budget."""
    rng = np.random.default_rng(seed)
    micro: list[list[int]] = []
    tokens = 0
    while tokens < settings.tokens:
        for batch in length_buckets(lengths, settings.batch_tokens, rng):
            micro.append(batch)
            tokens += int(lengths[batch].sum())
            if tokens >= settings.tokens:
                break
    size = settings.accumulate
    return [micro[i : i + size] for i in range(0, len(micro), size)]


@dataclass
class Loaded:
    """This rank's part of a step. `dead`: not even a stand-in could be read."""

    batches: list[Batch] = field(default_factory=list)
    rows: list[list[int]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    dead: bool = False


class Feeder:
    """Deals the micro-batches of a step to the ranks: rank r reads numbers r, r + size, …"""

    def __init__(self, source: Source, index: int, size: int, device: torch.device) -> None:
        self.source, self.index, self.size, self.device = source, index, size, device
        self.stateful = stateful(source)
        self.waited = 0.0  # seconds
        self.spare: Batch | None = None

    def load(self, step: int, micro: list[list[int]]) -> Loaded:
        """This rank's micro-batches, as many as every other rank has: where there are too few, one with nothing supervised."""
        started, loaded = time.monotonic(), Loaded()
        if self.stateful is not None:
            self.stateful.begin(step)
        for rows in micro[self.index :: self.size]:
            batch, good, failures = _read_rows(self.source, rows)
            loaded.failures += failures
            if batch is not None:
                loaded.batches.append(batch.to(self.device))
                loaded.rows.append(good)
        missing = -(-len(micro) // self.size) - len(loaded.batches)
        if missing and self.spare is None:
            # The same one whenever a run began: what noise and dropout draw for it is drawn before what follows.
            batch = self._any_row() or _read_rows(self.source, micro[0])[0]
            self.spare = (
                None if batch is None else replace(batch, supervised=torch.zeros_like(batch.supervised)).to(self.device)
            )
        if missing and self.spare is not None:
            loaded.batches += [self.spare] * missing
            loaded.rows += [[-1] * len(self.spare.lengths)] * missing
        loaded.dead = bool(missing) and self.spare is None
        self.waited += time.monotonic() - started
        return loaded

    def _any_row(self) -> Batch | None:
        for row in range(min(32, len(self.source.lengths))):
            if (batch := _read_rows(self.source, [row])[0]) is not None:
                return batch
        return None


def _read_rows(source: Source, rows: Sequence[int]) -> tuple[Batch | None, list[int], list[str]]:
    """The readable ones of some rows as a batch (None: there are none), which they are, and what is wrong with the others."""
    try:
        return source.batch(rows), list(rows), []
    except ROW_ERRORS:
        good, failures = [], []
    for row in rows:
        try:
            source.batch([row])
            good.append(row)
        except ROW_ERRORS as error:
            failures.append(f"row {row}: {str(error).splitlines()[0]}")
    return (source.batch(good) if good else None), good, failures
