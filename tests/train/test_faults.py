"""What is not finite is named: tensor, row, step; what was good before stays. FAULTS 21, 29, 34."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from kit import a_batch, a_head, tiny_target
from torch import Tensor

import draftsmith.train.checkpoint as checkpoint
import draftsmith.train.loop as loop
from draftsmith.data.batches import Batch
from draftsmith.errors import Stopped, UserError
from draftsmith.train.checkpoint import Checkpoints
from draftsmith.train.faults import only
from draftsmith.train.held_out import HeldOut
from draftsmith.train.loop import train
from draftsmith.train.objectives import EagleObjective
from draftsmith.train.settings import TrainSettings

SETTINGS = TrainSettings(tokens=2000, batch_tokens=48, validations=1, log_every=1, checkpoint_every=2)


class Rows:
    """Twelve rows in memory; `poison` changes the batch of a row."""

    def __init__(self) -> None:
        self.target = tiny_target()
        self.whole = a_batch(self.target, [12] * 12)
        self.lengths = self.whole.lengths.numpy()
        self.reads = 0
        self.poison: Any = lambda row, reads, batch: batch

    def batch(self, indices: Any) -> Batch:
        self.reads += 1
        rows = [self.poison(row, self.reads, only(self.whole, row)) for row in indices]
        joined = {
            name: torch.cat([getattr(row, name) for row in rows])
            for name in ("token_ids", "supervised", "lengths", "taps")
        }
        teacher = type(rows[0].teacher)(
            *(torch.cat(parts) for parts in zip(*(row.teacher for row in rows), strict=True))
        )
        return Batch(**joined, teacher=teacher)

    def train(self, folder: Path, settings: TrainSettings = SETTINGS, log: Any = None) -> EagleObjective:
        objective = EagleObjective(a_head(self.target), 2)
        held_out = HeldOut(self.target, [only(self.whole, 0)])
        train(objective, self, held_out, settings, folder=folder, seed=0, keep=lambda: None, log=log)
        return objective


def poisoned(batch: Batch, field: str, value: float) -> Batch:
    tensor = getattr(batch, field).clone()
    tensor[0, 3] = value
    return replace(batch, **{field: tensor})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_in_the_cache_stops_at_its_step_and_names_tensor_and_row(
    tmp_path: Path, value: float
) -> None:
    rows = Rows()
    rows.poison = lambda row, reads, batch: poisoned(batch, "taps", value) if row == 7 and reads > 9 else batch
    with pytest.raises(UserError, match=r"at step \d+, rows \[.*7.*\]: taps of row 7 hold numbers that are not finite"):
        rows.train(tmp_path)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    newest = checkpoints.newest(print)
    assert newest is not None
    assert newest.name > "step-000000000"
    assert all(torch.isfinite(tensor).all() for tensor in checkpoints.read(newest)[1]["weights"].values())


def unreadable(row: int, reads: int, batch: Batch) -> Batch:
    if row == 7:
        raise OSError("row 7 lies on a bad sector")
    return batch


def test_one_unreadable_row_of_twelve_is_one_of_twelve_however_many_epochs_meet_it(tmp_path: Path) -> None:
    rows = Rows()
    rows.poison = unreadable
    rows.train(tmp_path / "tenth", SETTINGS.model_copy(update={"bad_rows": 0.1}))  # fourteen epochs
    with pytest.raises(UserError, match=r"1 unreadable rows at step \d, more than bad_rows = 0.05 of 12 allows; row 7"):
        rows.train(tmp_path / "twentieth", SETTINGS.model_copy(update={"bad_rows": 0.05}))


def test_a_gradient_that_is_not_finite_names_its_weight_and_moves_nothing(tmp_path: Path) -> None:
    rows = Rows()

    class Overflow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * float("inf")

    objective = EagleObjective(a_head(rows.target), 1)
    plain_norm = objective.eagle.norm
    head = objective.head

    def overflowing(k: int) -> Any:
        found = head(k)
        assert found is not None
        return lambda states: plain_norm(Overflow.apply(states)), found[1]

    objective.head = overflowing  # type: ignore[method-assign]
    seen = {name: parameter.detach().clone() for name, parameter in objective.named_parameters()}
    with pytest.raises(UserError, match=r"gradient is not finite at step 0, .*the gradient of eagle\..* is not finite"):
        train(
            objective,
            rows,
            HeldOut(rows.target, [only(rows.whole, 0)]),
            SETTINGS,
            folder=tmp_path,
            seed=0,
            keep=lambda: None,
        )
    assert all(torch.equal(seen[name], parameter) for name, parameter in objective.named_parameters())


@pytest.fixture
def bf16(monkeypatch: pytest.MonkeyPatch) -> Any:
    """bf16 products, whatever this machine does fast; accelerate's state is of one precision at a time."""

    def reset() -> None:
        for state in (AcceleratorState, PartialState, GradientState):
            state._reset_state()

    reset()
    monkeypatch.setattr(loop, "compute_dtype", lambda device: torch.bfloat16)
    yield
    reset()


def test_in_bf16_every_tensor_moves_near_fp32_masters_and_the_same_after_a_resumption(
    tmp_path: Path, bf16: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fifty steps at 1e-4: far below half of bf16's spacing at the weights' size."""
    rows = Rows()
    settings = SETTINGS.model_copy(update={"tokens": 2400, "matrix_lr": 1e-4, "other_lr": 1e-4, "warmup": 0.0})
    start = {name: tensor.detach() for name, tensor in EagleObjective(a_head(rows.target), 2).named_parameters()}
    whole = rows.train(tmp_path / "whole", settings).state_dict()
    with pytest.raises(Stopped):
        rows.train(
            tmp_path / "parts", settings, lambda _, step: os.kill(os.getpid(), signal.SIGTERM) if step == 21 else None
        )
    checkpoints = Checkpoints(tmp_path / "parts" / "checkpoints")
    tensors = checkpoints.read(checkpoints.newest(print))[1]  # type: ignore[arg-type]
    assert {tensor.dtype for part in ("weights", "optimizer") for tensor in tensors[part].values()} == {torch.float32}
    resumed = rows.train(tmp_path / "parts", settings).state_dict()
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    monkeypatch.setattr(loop, "compute_dtype", lambda device: torch.float32)
    exact = rows.train(tmp_path / "exact", settings).state_dict()
    moved = drift = 0.0
    for name, before in start.items():
        assert not torch.equal(before, whole[name]), name
        assert torch.equal(whole[name], resumed[name]), name
        moved += float((exact[name] - before).norm() ** 2)
        drift += float((whole[name] - exact[name]).norm() ** 2)
        assert (whole[name] - exact[name]).norm() < 0.05 * exact[name].norm(), name
    assert 0 < drift < moved


def test_a_checkpoint_of_another_version_is_refused_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows()
    with monkeypatch.context() as older:
        older.setattr(checkpoint, "SCHEMA", 1)
        with pytest.raises(Stopped):
            rows.train(
                tmp_path / "run", SETTINGS, lambda _, step: os.kill(os.getpid(), signal.SIGTERM) if step == 2 else None
            )
    kept = sorted((tmp_path / "run").rglob("*"))
    with pytest.raises(UserError, match=r"checkpoint of schema 1, and this version of Draftsmith writes"):
        rows.train(tmp_path / "run", SETTINGS)
    assert sorted((tmp_path / "run").rglob("*")) == kept
