"""Several ranks are one: gloo processes on a CPU against a single process. FAULTS 20, 25, 28, 35."""

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from kit import a_batch, a_head, tiny_rows, tiny_target

from draftsmith.data.batches import Batch
from draftsmith.data.cache.build import build_cache
from draftsmith.data.cache.manifest import CacheSettings
from draftsmith.data.cache.reader import CacheReader
from draftsmith.errors import Stopped, UserError
from draftsmith.models.draft import DraftLM
from draftsmith.train.held_out import HeldOut
from draftsmith.train.loop import train
from draftsmith.train.objectives import DraftLMObjective, EagleObjective, Objective
from draftsmith.train.on_policy import OnPolicy
from draftsmith.train.settings import OnPolicySettings, TrainSettings

FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
SETTINGS = TrainSettings(
    tokens=10**6, batch_tokens=64, accumulate=3, validations=2, log_every=1, checkpoint_every=10**6, held_out_rows=1
)


class Rows:
    """A cache in memory whose rows can be made to fail, and which remembers what was read."""

    def __init__(self, reader: CacheReader, tokens: int) -> None:
        self.reader, self.lengths, self.read = reader, reader.lengths, []  # type: ignore[var-annotated]
        self.fails: Callable[[int], bool] = lambda row: False
        self.settings = SETTINGS.model_copy(update={"tokens": tokens})

    def batch(self, indices: Any) -> Batch:
        if failing := [row for row in indices if self.fails(row)]:
            raise ValueError(f"row {failing[0]} of the test fails")
        self.read += list(indices)
        return self.reader.batch(indices)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, CacheReader, HeldOut]:
    folder, target = tmp_path_factory.mktemp("ranks"), tiny_target()
    rows = tiny_rows(folder, [6 + i % 11 for i in range(30)])
    build_cache(target, rows, folder / "cache", CacheSettings(distribution="topk", state_codec="fp32", k=8))
    reader = CacheReader(folder / "cache", target.fingerprint())
    return target, reader, HeldOut.of(target, [rows[0]], reader.taps)


def new_objective(target: Any, kind: str = "eagle") -> Objective:
    if kind == "eagle":
        return EagleObjective(a_head(target), 2, 0.8)
    return DraftLMObjective(DraftLM.from_target_blocks(target, [0, 3]))


def together(size: int, act: Callable[[int], Any], folder: Path, **environment: str) -> list[Any]:
    """`act(rank)` in `size` processes that know of each other; what each returns, or the text of its UserError."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(size):
        if (pid := os.fork()) == 0:
            status = 1
            try:
                for state in (AcceleratorState, PartialState, GradientState):
                    state._reset_state()
                if size > 1:
                    os.environ |= {
                        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size),
                        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **environment,
                    }  # fmt: skip
                try:
                    result = act(rank)
                except UserError as error:
                    result = str(error)
                (folder / f"result-{rank}.json").write_text(json.dumps(result))
                status = 0
            finally:
                os._exit(status)
        children.append(pid)
    deadline = time.monotonic() + 60
    statuses: dict[int, int] = {}
    while len(statuses) < size and time.monotonic() < deadline:
        for pid in set(children) - statuses.keys():
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                statuses[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    for pid in set(children) - statuses.keys():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert statuses == dict.fromkeys(children, 0)
    return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(size)]


def a_run(parts: Any, folder: Path, rows: Rows, kind: str = "eagle", stop_at: int = 0) -> dict[str, Any]:
    """Train; losses of all steps on the main rank, rows read and a sum over each weight on all."""
    target, _, held_out = parts
    objective, losses, source = new_objective(target, kind), [], rows
    if kind == "on-policy":
        source = OnPolicy(rows, objective._draft, target, OnPolicySettings(share=0.5, every=3), seed=1)

    def log(values: dict[str, float], step: int) -> None:
        losses.append(values["loss"])
        if step == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    kept: list[dict[str, float]] = []

    def keep() -> None:
        kept.append({name: float(tensor.double().sum()) for name, tensor in objective.state_dict().items()})

    try:
        train(objective, source, held_out, rows.settings, folder=folder, seed=1, keep=keep, log=log)
    except BaseException as error:
        if type(error).__name__ != "Stopped":
            raise
    return {"losses": losses, "rows": rows.read, "kept": kept[-1] if kept else {}}


@pytest.mark.parametrize(
    ("kind", "environment"), [("eagle", {}), ("eagle", FSDP), ("draft", FSDP)], ids=["ddp", "fsdp2", "fsdp2-draft"]
)
def test_two_ranks_have_the_losses_of_one_at_each_of_fifty_steps(
    parts: Any, tmp_path: Path, kind: str, environment: dict[str, str]
) -> None:
    """Three micro-batches a step on two ranks: the second rank's last one is a stand-in. The draft that is kept is equal too."""

    def act(rank: int) -> Any:
        return a_run(parts, tmp_path / "run", Rows(parts[1], tokens=8_800), kind)

    (one,) = together(1, act, tmp_path)
    two = together(2, act, tmp_path, **environment)
    assert len(one["losses"]) >= 50
    assert two[0]["losses"] == pytest.approx(one["losses"], rel=1e-6, abs=1e-6)
    assert two[0]["kept"] == pytest.approx(one["kept"], rel=1e-3, abs=1e-3)
    assert two[1]["losses"] == []
    assert two[1]["kept"] == {}


@pytest.mark.parametrize("environment", [{}, FSDP], ids=["ddp", "fsdp2"])
def test_on_policy_rows_are_those_of_one_rank_also_after_an_interruption(
    parts: Any, tmp_path: Path, environment: dict[str, str]
) -> None:
    """Stopped at step 5, where the writing draft has the weights of step 3."""

    def act(name: str, stop_at: int = 0) -> Callable[[int], Any]:
        return lambda rank: a_run(
            parts, tmp_path / name, Rows(parts[1], tokens=1_800), "on-policy", stop_at=stop_at if rank == 0 else 0
        )

    (one,) = together(1, act("one"), tmp_path)
    first = together(2, act("two", stop_at=5), tmp_path, **environment)
    second = together(2, act("two"), tmp_path, **environment)
    assert len(first[0]["losses"]) == 5
    assert len(one["losses"]) > 8
    assert first[0]["losses"] + second[0]["losses"] == pytest.approx(one["losses"], rel=1e-6, abs=1e-6)
    assert second[0]["kept"] == pytest.approx(one["kept"], rel=1e-3, abs=1e-3)


def test_every_row_is_read_by_one_rank_once_an_epoch_over_both_parts_and_other_numbers_of_ranks(
    parts: Any, tmp_path: Path
) -> None:
    """Two ranks are stopped and four go on, then one: the rows and losses are those of an undisturbed run."""
    tokens = 4 * int(parts[1].lengths.sum())

    def act(stop_at: int) -> Callable[[int], Any]:
        return lambda rank: a_run(parts, tmp_path / "run", Rows(parts[1], tokens), stop_at=stop_at if rank == 0 else 0)

    first = together(2, act(2), tmp_path)
    second = together(4, act(3), tmp_path)
    third = together(1, act(0), tmp_path)
    (whole,) = together(1, lambda rank: a_run(parts, tmp_path / "whole", Rows(parts[1], tokens)), tmp_path)
    losses = first[0]["losses"] + second[0]["losses"] + third[0]["losses"]
    assert losses == pytest.approx(whole["losses"], rel=1e-5, abs=1e-5)
    assert len(first[0]["losses"]) == 2
    assert len(second[0]["losses"]) == 1
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "training.jsonl").read_text().splitlines()]
    assert steps == list(range(1, len(whole["losses"]) + 1))
    read = {row for part in (first, second, third) for rank in part for row in rank["rows"]}
    assert read == set(range(30))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_batches_are_fully_masked_hangs_nothing_and_the_loss_is_that_of_one(
    parts: Any, tmp_path: Path, rank: int
) -> None:
    target = parts[0]
    batches = [a_batch(target, [9, 7], seed=seed) for seed in range(2)]
    masked = batches[rank]
    masked.supervised[:] = False

    class Two:
        lengths = torch.tensor([9, 9]).numpy()

        def batch(self, indices: Any) -> Batch:
            (index,) = indices
            return batches[index]

    settings = TrainSettings(tokens=90, batch_tokens=9, accumulate=2, validations=1, log_every=1)

    def act(_: int) -> Any:
        losses: list[float] = []
        objective = new_objective(target)
        log = lambda values, step: losses.append(values["loss"])  # noqa: E731
        train(objective, Two(), parts[2], settings, folder=tmp_path / "run", seed=0, keep=lambda: None, log=log)
        return [losses, [float(p.detach().double().sum()) for p in objective.parameters()]]

    (one,) = together(1, act, tmp_path)
    left, right = together(2, act, tmp_path)
    assert left[1] == right[1]
    assert left[0] == pytest.approx(one[0], rel=1e-6)
    assert one[0][0] > 0


def test_one_failing_row_in_ten_on_one_rank_is_counted_and_the_run_goes_on(parts: Any, tmp_path: Path) -> None:
    def act(rank: int) -> Any:
        rows = Rows(parts[1], tokens=1500)
        rows.settings = rows.settings.model_copy(update={"bad_rows": 0.5})
        rows.fails = lambda row: rank == 1 and row % 10 == 3
        return a_run(parts, tmp_path / "run", rows)

    left, right = together(2, act, tmp_path)
    assert len(left["losses"]) > 5
    assert not any(row % 10 == 3 for row in right["rows"])


def test_every_row_failing_stops_both_ranks_and_the_reason_is_told(parts: Any, tmp_path: Path) -> None:
    def act(rank: int) -> Any:
        rows = Rows(parts[1], tokens=1500)
        rows.fails = lambda row: True
        return a_run(parts, tmp_path / "run", rows)

    for said in together(2, act, tmp_path):
        assert "unreadable rows at step 0" in said
        assert "of the test fails" in said


def test_fsdp_of_version_1_is_refused_in_one_line(parts: Any, tmp_path: Path) -> None:
    environment = FSDP | {"FSDP_VERSION": "1"}
    said = together(2, lambda rank: a_run(parts, tmp_path / "run", Rows(parts[1], 500)), tmp_path, **environment)
    assert all("choose fsdp_version: 2" in text for text in said)


def test_two_ranks_draw_other_noise_each_and_the_same_after_they_were_stopped(parts: Any, tmp_path: Path) -> None:
    """The second rank's stand-in draws too, so it must be the same batch before and after."""

    def act(folder: str, stop_at: int = 0) -> Callable[[int], Any]:
        def noisy(rank: int) -> Any:
            drawn: list[float] = []
            objective = new_objective(parts[0])
            objective.noise = 0.5
            objective.register_forward_pre_hook(lambda *_: drawn.append(float(torch.get_rng_state().double().sum())))

            def log(values: dict[str, float], step: int) -> None:
                if step == stop_at:
                    os.kill(os.getpid(), signal.SIGTERM)

            rows = Rows(parts[1], tokens=900)
            with suppress(Stopped):
                train(
                    objective, rows, parts[2], rows.settings, folder=tmp_path / folder, seed=1, keep=lambda: None, log=log
                )  # fmt: skip
            return drawn

        return noisy

    whole = together(2, act("whole"), tmp_path)
    first = together(2, act("parts", stop_at=3), tmp_path)
    second = together(2, act("parts"), tmp_path)
    assert len(second[0]) > 4
    assert not set(whole[0]) & set(whole[1])
    assert [first[rank] + second[rank] for rank in (0, 1)] == whole
