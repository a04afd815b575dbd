"""One training loop for every draft: cached rows in, optimiser steps, held-out acceptance, the best weights out.

Loss of a step = Σ over its supervised predictions of weight · value, divided by Σ of the weights in the whole step: it depends on
neither padding nor how the step is split into micro-batches. Knows no draft type and no file format of drafts.
"""

import json
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from accelerate import Accelerator

from draftsmith.data.batches import Batch, length_buckets
from draftsmith.errors import UserError
from draftsmith.progress import ticker
from draftsmith.train.held_out import HeldOut
from draftsmith.train.objectives import Objective, Sums
from draftsmith.train.optim import compute_dtype, make_optimizer, schedule, set_learning_rate
from draftsmith.train.settings import TrainSettings

Log = Callable[[dict[str, float], int], None]


class Source(Protocol):
    """Where rows come from: a cache on disk, the target at work, the draft's own continuations."""

    lengths: np.ndarray  # int64 [rows], tokens of each

    def batch(self, indices: Sequence[int]) -> Batch:
        """Some rows with all that their objective needs, padded."""
        ...


@dataclass
class Summary:
    """What a training run came to. expected_acceptance: held out, per rollout step, of the weights that were kept."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best_step: int = 0
    expected_acceptance: list[float] = field(default_factory=list)
    at_start: list[float] = field(default_factory=list)


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

    Writes `<folder>/training.jsonl`. Raises UserError for a loss that is not finite, naming step and rows.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plan = batch_plan(source.lengths, settings, seed)
    device = held_out.target.device
    precision = "bf16" if compute_dtype(device) == torch.bfloat16 else "no"
    accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision=precision)
    optimizer = make_optimizer(objective, settings.matrix_lr, settings.other_lr, settings.weight_decay)
    model, optimizer = accelerator.prepare(objective, optimizer)
    summary = Summary(steps=len(plan), at_start=held_out.expected_acceptance(objective))
    validate_at = {round((i + 1) * len(plan) / settings.validations) for i in range(settings.validations)}
    best, kept, started = -1.0, summary.at_start, time.monotonic()
    total = sum(int(source.lengths[rows].sum()) for micro in plan for rows in micro)
    with (folder / "training.jsonl").open("w") as lines, ticker(title, total, "tokens") as progress:
        for step, micro in enumerate(plan):
            batches = [source.batch(rows).to(device) for rows in micro]
            set_learning_rate(optimizer, schedule(step, len(plan), max(1, round(settings.warmup * len(plan)))))
            loss, sums = _step(model, objective, batches, optimizer, accelerator, settings.clip)
            if not np.isfinite(loss):
                raise UserError(
                    f"{title}: the loss is {loss} at step {step}, rows {[r for rows in micro for r in rows]}"
                )
            tokens = sum(int(batch.lengths.sum()) for batch in batches)
            summary.tokens += tokens
            progress.advance(tokens, f"loss {loss:.3f}")
            record = _record(loss, sums, optimizer.param_groups[0]["lr"], progress.rate)
            if step + 1 in validate_at:
                summary.expected_acceptance = held_out.expected_acceptance(objective)
                record["held_out_run_length"] = _run_length(summary.expected_acceptance)
                if not np.isfinite(record["held_out_run_length"]):
                    raise UserError(
                        f"{title}: held-out acceptance is not a number at step {step}; lower matrix_lr and other_lr"
                    )
                if record["held_out_run_length"] > best:
                    best, summary.best_step, kept = record["held_out_run_length"], step + 1, summary.expected_acceptance
                    keep()
            if step % settings.log_every == 0 or step + 1 in validate_at:
                lines.write(json.dumps({"step": step + 1, **record}) + "\n")
                lines.flush()
                if log is not None:
                    log(record, step + 1)
    summary.expected_acceptance = kept
    summary.seconds = time.monotonic() - started
    return summary


def _step(model, objective: Objective, batches: list[Batch], optimizer, accelerator: Accelerator, clip: float):  # type: ignore[no-untyped-def]
    """One optimiser step over its micro-batches. Returns the step's loss, and its sums without gradient."""
    weight = max(sum(objective.weight(batch) for batch in batches), 1e-9)
    parts: list[Sums] = []
    for batch in batches:
        with accelerator.autocast():
            sums = model(batch)
        accelerator.backward(sums.loss / weight)
        parts.append(Sums(sums.loss.detach(), sums.accepted, sums.count))
    if clip:
        accelerator.clip_grad_norm_(objective.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad()
    total = Sums(
        *(torch.stack([getattr(part, name) for part in parts]).sum(0) for name in ("loss", "accepted", "count"))
    )
    return float(total.loss) / weight, total


def _record(loss: float, sums: Sums, learning_rate: float, rate: float) -> dict[str, float]:
    steps = (sums.accepted / sums.count.clamp(min=1)).tolist()
    return {
        "loss": loss,
        "expected_acceptance": steps[0],
        **{f"expected_acceptance/{k}": value for k, value in enumerate(steps) if len(steps) > 1},
        "learning_rate": learning_rate,
        "tokens_per_second": rate,
        "memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def _run_length(acceptance: list[float]) -> float:
    """Expected accepted tokens of a chain whose positions accept independently: Σ_k Π_{i≤k} α_i. Picks the best weights."""
    return float(np.cumprod(acceptance).sum())
