"""One training loop for every draft: rows in, optimiser steps, held-out acceptance, the best weights out, and no work lost.

Loss of a step = Σ over its supervised predictions of weight · value, divided by Σ of the weights in the whole step: it depends on
neither padding nor how the step is split into micro-batches and over ranks. A run that was ended at any instant continues from
its last checkpoint as if nothing had happened (fp32 on one rank: bit by bit). Knows no draft type and no file format of drafts.
"""

import json
import math
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from draftsmith.data.batches import Batch
from draftsmith.errors import Stopped, UserError
from draftsmith.files import publish_text
from draftsmith.progress import Ticker, ticker
from draftsmith.train.checkpoint import (
    SOURCE,
    Checkpoints,
    capture,
    generators,
    of_rank,
    restore,
    set_generators,
)
from draftsmith.train.faults import nonfinite, nonfinite_gradients
from draftsmith.train.feeder import Feeder, Loaded, Source, batch_plan
from draftsmith.train.held_out import HeldOut
from draftsmith.train.identity import changed, identity
from draftsmith.train.objectives import Objective, Sums
from draftsmith.train.optim import compute_dtype, make_optimizer, schedule, set_learning_rate
from draftsmith.train.ranks import Ranks, unsharded
from draftsmith.train.settings import TrainSettings
from draftsmith.train.signals import on_signals
from draftsmith.train.telemetry import measured, note, run_length

Log = Callable[[dict[str, float], int], None]
CHECKPOINTS = "checkpoints"


@dataclass
class Summary:
    """What a training run came to. expected_acceptance: held out, per rollout step, of the weights that were kept, which are
    those of best_step; last: of the weights at the end, step `steps`. seconds: of all its parts, if it was interrupted."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best_step: int = 0
    expected_acceptance: list[float] = field(default_factory=list)
    last: list[float] = field(default_factory=list)
    at_start: list[float] = field(default_factory=list)
    bad_rows: int = 0


def train(
    objective: Objective,
    source: Source,
    held_out: HeldOut,
    settings: TrainSettings,
    *,
    folder: Path,
    seed: int,
    keep: Callable[[], None],
    log: Log | None = None,
    title: str = "train",
) -> Summary:
    """Train `objective` on the rows of `source`. `keep()` is called whenever held-out acceptance is the best so far.

    Writes `<folder>/training.jsonl`, and `<folder>/checkpoints` until it is done; continues from what it finds there. Under
    several ranks all of them call it, and only the main one keeps, writes and logs. Raises UserError for a number that is not
    finite (naming tensor, row and step), for too many unreadable rows, a disk that refuses, and checkpoints of other settings;
    Stopped after SIGINT or SIGTERM, when the run is saved.
    """
    return _Trainer(objective, source, held_out, settings, folder, seed, keep, log, title).run()


class _Replica(nn.Module):
    """An objective whose result is a tuple, where the hooks of FSDP2 look for tensors."""

    def __init__(self, objective: Objective) -> None:
        super().__init__()
        self.objective = objective

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        sums = self.objective(batch)
        return sums.loss, sums.accepted, sums.count


@dataclass
class _Position:
    """Where a run stands: all that a checkpoint holds beside tensors."""

    step: int = 0
    weight: float = 0.0  # of all predictions that were trained
    best: float = -1.0
    match: float = 0.0  # greedy, of the first step, of the weights that were kept
    since_best: int = 0
    lines: str = ""  # of training.jsonl
    summary: Summary = field(default_factory=Summary)


@dataclass
class _Trainer:
    """One run from its start or last checkpoint to its end."""

    objective: Objective
    source: Source
    held_out: HeldOut
    settings: TrainSettings
    folder: Path
    seed: int
    keep: Callable[[], None]
    log: Log | None
    title: str
    at: _Position = field(default_factory=_Position)
    stop: int | None = None  # the signal that asked for it
    before: float = 0.0  # seconds of earlier parts of this run
    started: float = field(default_factory=time.monotonic)

    def run(self) -> Summary:
        """The whole of it. The checkpoints are gone when it returns: the draft that was kept is the result."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.checkpoints = Checkpoints(self.folder / CHECKPOINTS)
        self.objective.train()  # models are read in evaluation mode, in which nothing drops out
        for parameter in self.objective.parameters():
            parameter.data = parameter.data.float()  # masters: below 2⁻⁸ of a weight a bf16 step is no step
        self.plan = batch_plan(self.source.lengths, self.settings, self.seed)
        self.device = self.held_out.target.device
        self.identity = identity(self.objective, self.source, self.held_out, self.settings, self.seed)
        self.ranks = Ranks(self.device, "bf16" if compute_dtype(self.device) == torch.bfloat16 else "no")
        self.feeder = Feeder(self.source, self.ranks.index, self.ranks.size, self.device)
        self.model = self.ranks.wrap(_Replica(self.objective))
        self.optimizer = make_optimizer(
            self.objective, self.settings.matrix_lr, self.settings.other_lr, self.settings.weight_decay
        )
        with on_signals(self._asked_to_stop):
            try:
                self._begin()
                self._loop()
            except (OSError, SafetensorError) as error:
                reason = str(error).splitlines()[0]
                raise UserError(f"{self.title}: cannot be written ({reason}); {self._how_to_go_on()}") from error
        self.ranks.wait()
        if self.ranks.main:
            whole = self.checkpoints.draft_is_whole()
            self.checkpoints.clear()
            if not whole:
                raise UserError(
                    f"{self.folder}: the draft has been damaged since it was kept; run the same command again"
                )
        self.at.summary.seconds = self._seconds()
        return self.at.summary

    def _begin(self) -> None:
        """From the newest checkpoint, or from the start, which is saved at once: a full disk shows before the work."""
        place = self.ranks.agree(self.checkpoints.newest(self._say) if self.ranks.main else None)
        if place is not None:
            self._resume(*self.checkpoints.read(place))
            return
        torch.manual_seed(self.seed + self.ranks.index)  # of noise and dropout, whatever this process did before
        any_trained = [bool(self.objective.trained_slots(batch, 0).any()) for batch in self.held_out.batches]
        if any_trained and not any(any_trained):
            raise UserError(f"{self.title}: none of the held-out rows has {self._supervised()}, or raise held_out_rows")
        self.at.summary.at_start = self._acceptance()
        self.at.summary.expected_acceptance = self.at.summary.at_start
        if self.ranks.main:
            (self.folder / "training.jsonl").write_text("")
        if self.ranks.size > self.settings.accumulate:
            self._say(f"accumulate is {self.settings.accumulate}: {self.ranks.size} ranks need as many micro-batches")
        self._save()

    def _resume(self, state: dict[str, Any], tensors: dict[str, dict[str, Tensor]]) -> None:
        if other := changed(state["identity"], self.identity):
            raise UserError(
                f"{self.checkpoints.folder}: of a run with another {', '.join(other)}; "
                "restore the setting to continue it, or delete the folder to begin anew"
            )
        # Two ranks must not draw the same noise, so one that the checkpoint does not know begins with a seed of its own.
        torch.manual_seed(self.seed + self.ranks.index + len(self.plan) * state["position"]["step"])
        restore(self.objective, self.optimizer, tensors, self.ranks.index)
        set_generators(state["generators"])
        if self.feeder.stateful is not None:
            self.feeder.stateful.restore(tensors[SOURCE])
        position = state["position"]
        self.at = _Position(**{**position, "summary": Summary(**position["summary"])})
        self.before = self.at.summary.seconds
        if self.ranks.main:
            publish_text(self.folder / "training.jsonl", self.at.lines)  # later lines come again
        self._say(f"continues at step {self.at.step} of {len(self.plan)}")
        if state["ranks"] != self.ranks.size:
            self._say(
                f"{state['ranks']} ranks before, {self.ranks.size} now: same rows in the same order, other rounding"
            )

    def _loop(self) -> None:
        lengths, at, settings = self.source.lengths, self.at, self.settings
        self.validate_at = {round((i + 1) * len(self.plan) / settings.validations) for i in range(settings.validations)}
        total = sum(int(lengths[rows].sum()) for micro in self.plan[at.step :] for rows in micro)
        self.started = time.monotonic()
        with (
            (self.folder / "training.jsonl").open("a") if self.ranks.main else nullcontext() as lines,
            ticker(self.title, total, "tokens") if self.ranks.main else nullcontext() as progress,
        ):
            while at.step < len(self.plan):
                self._one(self.plan[at.step], lines, progress)
                if settings.patience and at.since_best >= settings.patience and at.step < len(self.plan):
                    self._say(f"no better held-out acceptance in {settings.patience} validations: stops early")
                    at.summary.steps = at.step
                    break
                if at.step % settings.checkpoint_every == 0 and at.step < len(self.plan):
                    self._save(lines)

    def _one(self, micro: list[list[int]], lines: IO[str] | None, progress: Ticker | None) -> None:
        """One optimiser step and what follows from it."""
        at, settings, step = self.at, self.settings, self.at.step
        loaded = self.feeder.load(step, micro)
        weight, stop, failed, dead = self.ranks.sum(
            [
                sum(self.objective.weight(batch) for batch in loaded.batches),
                self.stop is not None,
                len(loaded.failures),
                loaded.dead,
            ]
        )
        if stop:
            self._save(lines)
            raise Stopped(self.stop or signal.SIGTERM, f"{self.title}: saved; {self._how_to_go_on()}")
        at.summary.bad_rows += round(failed)
        self._check_rows(loaded, dead > 0)
        warmup = max(1, round(settings.warmup * len(self.plan)))
        set_learning_rate(self.optimizer, schedule(step, len(self.plan), warmup))
        loss, sums = self._step(loaded, max(weight, 1e-9), micro)
        at.step += 1
        at.weight += weight
        tokens = sum(int(self.source.lengths[rows].sum()) for rows in micro)
        at.summary.tokens += tokens
        at.summary.steps = at.step
        rate = progress.rate if progress is not None else 0.0
        record = measured(loss, sums, self.optimizer.param_groups[0]["lr"], rate) | {
            "data_wait": self.feeder.waited / max(time.monotonic() - self.started, 1e-9)
        }
        if progress is not None:
            progress.advance(tokens, note(record))
        if at.step in self.validate_at:
            record |= self._validate(step)
        if lines is not None and (step % settings.log_every == 0 or at.step in self.validate_at):
            lines.write(json.dumps({"step": at.step, **record}) + "\n")
            lines.flush()
            if self.log is not None:
                self.log(record, at.step)

    def _check_rows(self, loaded: Loaded, dead: bool) -> None:
        bad, total = self.at.summary.bad_rows, len(self.source.lengths)
        if bad > self.settings.bad_rows * total:  # a row counts once an epoch, whether it can be read or not
            total = max(total, sum(len(rows) for micro in self.plan[: self.at.step + 1] for rows in micro))
        for failure in loaded.failures:
            self._say(f"left out: {failure}", main=False)
        if bad > self.settings.bad_rows * total or dead:
            first = loaded.failures[0] if loaded.failures else "seen by another rank"
            raise UserError(
                f"{self.title}: {bad} unreadable rows at step {self.at.step}, more than bad_rows = "
                f"{self.settings.bad_rows:g} of {total} allows; {first}"
            )

    def _step(self, loaded: Loaded, weight: float, micro: list[list[int]]) -> tuple[float, Sums]:
        """Forward and backward over the micro-batches and one update. Returns loss and sums of the step over all ranks."""
        ranks, parts = self.ranks, []
        for number, batch in enumerate(loaded.batches):
            with ranks.unsynchronised(self.model, last=number == len(loaded.batches) - 1):
                with ranks.accelerator.autocast():
                    value, accepted, count = self.model(batch)
                # Both ways of several ranks average gradients over them, where their sum is meant.
                (value * (ranks.size / weight)).backward()
            parts.append(torch.cat([value.detach()[None], accepted, count]).double().cpu())
        total = torch.tensor(ranks.sum(torch.stack(parts).sum(0).tolist()))
        loss, K = float(total[0]) / weight, self.objective.steps
        if not math.isfinite(loss):
            with unsharded(self.objective):
                cause = nonfinite(self.objective, loaded.batches, loaded.rows)
            raise UserError(f"{self._unfinite(f'loss is {loss}', micro)}: {cause or 'seen by another rank'}")
        parameters = [parameter for parameter in self.objective.parameters() if parameter.grad is not None]
        norm = nn.utils.clip_grad_norm_(parameters, self.settings.clip or math.inf)
        if not torch.isfinite(norm):
            cause = nonfinite_gradients(self.objective)
            cause = cause or "the norm of all together is too large for a number, or another rank saw it"
            raise UserError(f"{self._unfinite('gradient is not finite', micro)}: {cause}")
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, Sums(total[0], total[1 : 1 + K], total[1 + K :])

    def _supervised(self) -> str:
        return f"a supervised token after its token {self.objective.lead}, where this draft begins; add answers"

    def _unfinite(self, what: str, micro: list[list[int]]) -> str:
        return f"{self.title}: the {what} at step {self.at.step}, rows {[row for rows in micro for row in rows]}"

    def _validate(self, step: int) -> dict[str, float]:
        """Held-out acceptance; the weights are kept where it is the best so far."""
        if not self.at.weight:
            raise UserError(f"{self.title}: nothing trained in {self.at.step} steps: no row has {self._supervised()}")
        at, acceptance = self.at, self._acceptance()
        reached = run_length(acceptance)
        if not np.isfinite(reached):
            raise UserError(
                f"{self.title}: held-out acceptance is not a number at step {step}; lower matrix_lr and other_lr"
            )
        at.summary.last, at.since_best = acceptance, at.since_best + 1
        if reached > at.best:
            at.best, at.since_best, at.summary.best_step = reached, 0, at.step
            at.summary.expected_acceptance = acceptance
            with unsharded(self.objective):
                if self.ranks.main:
                    self.keep()
                    self.checkpoints.note_draft()
                    at.match = self.held_out.match(self.objective)
        values = {"held_out_run_length": reached, "best_run_length": at.best, "best_step": at.summary.best_step}
        return values | {"best_match": at.match}

    def _acceptance(self) -> list[float]:
        with unsharded(self.objective):
            return self.ranks.agree(self.held_out.expected_acceptance(self.objective) if self.ranks.main else None)

    def _save(self, lines: IO[str] | None = None) -> None:
        tensors = capture(self.objective, self.optimizer)
        randoms = self.ranks.gather(tensors["random"])
        if not self.ranks.main:
            return
        tensors["random"] = {
            name: state for rank, own in enumerate(randoms) for name, state in of_rank(own, rank).items()
        }
        if self.feeder.stateful is not None:
            tensors[SOURCE] = self.feeder.stateful.state()
        self.at.lines = (self.folder / "training.jsonl").read_text() if lines is not None else ""
        self.at.summary.seconds = self._seconds()
        state = {
            "identity": self.identity,
            "position": asdict(self.at),
            "generators": generators(),
            "ranks": self.ranks.size,
        }
        self.checkpoints.save(self.at.step, tensors, state)

    def _asked_to_stop(self, number: int) -> None:
        if self.stop is not None:
            raise Stopped(number, f"{self.title}: stopped at once; {self._how_to_go_on()}")
        self.stop = number

    def _how_to_go_on(self) -> str:
        return f"the same command continues from its last checkpoint (step {self.at.step} of {len(self.plan)} reached)"

    def _seconds(self) -> float:
        return self.before + time.monotonic() - self.started

    def _say(self, text: str, main: bool = True) -> None:
        if self.ranks.main or not main:
            print(f"{self.title}: {text}", file=sys.stderr, flush=True)
