"""Training that is ended at any instant goes on as if nothing had happened: FAULTS 30, 33, 34, 36."""

import errno
import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import a_head, tiny_rows, tiny_target
from pydantic import ValidationError
from torch import Tensor

import draftsmith.train.checkpoint as checkpoint
from draftsmith.data.cache.build import build_cache
from draftsmith.data.cache.manifest import CacheSettings
from draftsmith.data.cache.reader import CacheReader
from draftsmith.errors import Stopped, UserError
from draftsmith.models.target import Target
from draftsmith.train.held_out import HeldOut
from draftsmith.train.loop import Summary, train
from draftsmith.train.objectives import EagleObjective
from draftsmith.train.settings import TrainSettings

TIMES = ("tokens_per_second", "memory_gb", "data_wait")
SETTINGS = TrainSettings(
    tokens=1200, batch_tokens=100, accumulate=1, validations=4, log_every=1, checkpoint_every=4, held_out_rows=2
)


@dataclass
class Bench:
    """A target, a cache of it and held-out states, shared by all runs of this file."""

    target: Target
    reader: CacheReader
    held_out: HeldOut


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder, target = tmp_path_factory.mktemp("resume"), tiny_target()
    rows = tiny_rows(folder, [12 + i % 20 for i in range(24)])
    build_cache(target, rows, folder / "cache", CacheSettings(distribution="topk", state_codec="fp32", k=8))
    reader = CacheReader(folder / "cache", target.fingerprint())
    return Bench(target, reader, HeldOut.of(target, [rows[0], rows[1]], reader.taps))


@dataclass
class Run:
    """One call of `train` on a fresh head; what it did is remembered."""

    bench: Bench
    folder: Path
    settings: TrainSettings = SETTINGS
    seed: int = 3
    start: float = 1.0  # times a matrix of the head that training starts from
    drops: float = 0.0  # share of a layer's numbers that training drops, of a draft that comes in evaluation mode
    on_step: Callable[[int], None] = lambda step: None
    rows: list[list[int]] = field(default_factory=list)
    tracked: list[tuple[int, float]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    kept: dict[str, Tensor] = field(default_factory=dict)
    held_out: Any = None

    @property
    def lengths(self) -> Any:
        return self.bench.reader.lengths

    @property
    def identity(self) -> str:
        return self.bench.reader.identity

    def batch(self, indices: Any) -> Any:
        self.rows.append(list(indices))
        return self.bench.reader.batch(indices)

    def train(self) -> Summary:
        objective = EagleObjective(a_head(self.bench.target), 2, 0.8)
        objective.eagle.fc.weight.data *= self.start
        if self.drops:
            layer = objective.eagle.first_layer
            layer.mlp = torch.nn.Sequential(layer.mlp, torch.nn.Dropout(self.drops)).eval()

        def copy() -> dict[str, Tensor]:
            return {name: tensor.clone() for name, tensor in objective.state_dict().items()}

        def keep() -> None:
            self.kept.update(copy())
            (self.folder / "draft.bin").write_bytes(b"".join(t.numpy().tobytes() for t in self.kept.values()))

        def log(values: dict[str, float], step: int) -> None:
            self.tracked.append((step, values["learning_rate"]))
            self.on_step(step)

        summary = train(
            objective,
            self,
            self.held_out or self.bench.held_out,
            self.settings,
            folder=self.folder,
            seed=self.seed,
            keep=keep,
            log=log,
        )
        self.weights = copy()
        return summary

    def lines(self) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in (self.folder / "training.jsonl").read_text().splitlines()]
        return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


@pytest.fixture(scope="module")
def whole(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The undisturbed run."""
    run = Run(bench, tmp_path_factory.mktemp("whole"))
    run.train()
    return run


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def in_child(act: Callable[[], Any]) -> int:
    """`act` in a forked process; its exit status, negative for a signal."""
    if (pid := os.fork()) == 0:
        try:
            act()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill(number: int, at: int) -> Callable[[int], None]:
    return lambda step: os.kill(os.getpid(), number) if step == at else None


@pytest.mark.parametrize("at", [1, 8, 11])
def test_killed_and_continued_a_run_is_bit_equal_to_one_that_was_left_alone(
    bench: Bench, whole: Run, tmp_path: Path, at: int
) -> None:
    assert in_child(Run(bench, tmp_path, on_step=kill(signal.SIGKILL, at)).train) == -signal.SIGKILL
    again = Run(bench, tmp_path)
    again.train()
    done = at - at % SETTINGS.checkpoint_every if at % 4 else at - 4  # the kill comes before the save of its own step
    assert again.rows == whole.rows[done:]
    assert again.tracked == whole.tracked[done:]
    assert again.lines() == whole.lines()
    assert same(again.weights, whole.weights)
    assert not (tmp_path / "checkpoints").exists()


def test_a_draft_with_dropout_goes_on_as_it_was_trained(bench: Bench, tmp_path: Path) -> None:
    """Models are read in evaluation mode: a run that continues must not wait for its first validation to train again."""
    alone, broken = (Run(bench, tmp_path / name, drops=0.5) for name in ("alone", "broken"))
    torch.manual_seed(0)
    alone.train()
    torch.manual_seed(0)
    assert in_child(Run(bench, broken.folder, drops=0.5, on_step=kill(signal.SIGKILL, 9)).train) == -signal.SIGKILL
    broken.train()
    assert same(broken.weights, alone.weights)


def test_killed_twice_and_in_the_middle_of_a_save_a_run_is_bit_equal(
    bench: Bench, whole: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert in_child(Run(bench, tmp_path, on_step=kill(signal.SIGKILL, 6)).train) == -signal.SIGKILL
    with monkeypatch.context() as patch:
        publish_json = checkpoint.publish_json

        def killed_in_a_save(path: Path, value: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL) if path.name == checkpoint.STATE else publish_json(path, value)

        patch.setattr(checkpoint, "publish_json", killed_in_a_save)
        assert in_child(Run(bench, tmp_path).train) == -signal.SIGKILL
    assert {place.name for place in (tmp_path / "checkpoints").iterdir()} == {
        ".partial", "kept.json", "step-000000000", "step-000000004",
    }  # fmt: skip
    again = Run(bench, tmp_path)
    again.train()
    assert same(again.weights, whole.weights)
    assert again.lines() == whole.lines()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_at_once_says_how_to_go_on_and_nothing_is_done_twice(
    bench: Bench, whole: Run, tmp_path: Path, number: int
) -> None:
    first = Run(bench, tmp_path, on_step=kill(number, 6))
    with pytest.raises(Stopped, match=r"saved; the same command continues .*step 6 of") as stopped:
        first.train()
    assert stopped.value.signal == number
    again = Run(bench, tmp_path)
    again.train()
    assert first.tracked + again.tracked == whole.tracked
    assert same(again.weights, whole.weights)
    assert again.lines() == whole.lines()


def test_a_full_disk_shows_at_step_0_before_any_work(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "save_file", full_disk)
    run = Run(bench, tmp_path)
    with pytest.raises(UserError, match=r"No space left on device.*the same command continues"):
        run.train()
    assert run.rows == []


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_save_that_fails_leaves_the_one_before_and_the_run_continues_from_it(
    bench: Bench, whole: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        run = Run(
            bench,
            tmp_path,
            on_step=lambda step: patch.setattr(checkpoint, "save_file", full_disk) if step == 6 else None,
        )
        with pytest.raises(UserError, match="No space left"):
            run.train()
    assert sorted(place.name for place in (tmp_path / "checkpoints").glob("step-*")) == [
        "step-000000000", "step-000000004",
    ]  # fmt: skip
    again = Run(bench, tmp_path)
    again.train()
    assert same(again.weights, whole.weights)
    assert again.lines() == whole.lines()


@pytest.mark.parametrize("left", [None, 0, 40])
def test_training_jsonl_that_was_lost_or_cut_short_is_written_again_by_a_run_that_continues(
    bench: Bench, whole: Run, tmp_path: Path, left: int | None
) -> None:
    assert in_child(Run(bench, tmp_path, on_step=kill(signal.SIGKILL, 6)).train) == -signal.SIGKILL
    file = tmp_path / "training.jsonl"
    content = file.read_bytes()
    file.unlink() if left is None else file.write_bytes(content[:left])
    again = Run(bench, tmp_path)
    again.train()
    assert again.lines() == whole.lines()


def test_a_draft_that_was_damaged_after_it_was_kept_stops_its_run_and_the_next_one_trains_it_anew(
    bench: Bench, tmp_path: Path
) -> None:
    def run(on_step: Callable[[int], None] = lambda step: None) -> Run:
        return Run(bench, tmp_path, held_out=Stub(bench.target, 0.5, 0.4, 0.3, 0.2), on_step=on_step)

    with pytest.raises(Stopped):
        run(kill(signal.SIGTERM, 6)).train()
    content = (tmp_path / "draft.bin").read_bytes()
    (tmp_path / "draft.bin").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(UserError, match="damaged since it was kept; run the same command again"):
        run().train()
    run().train()
    assert (tmp_path / "draft.bin").read_bytes() == content


@pytest.mark.parametrize(
    ("name", "damage"), [("weights.safetensors", "cut"), ("optimizer.safetensors", "flip"), ("state.json", "flip")]
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    bench: Bench, whole: Run, tmp_path: Path, name: str, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Stopped):
        Run(bench, tmp_path, on_step=kill(signal.SIGTERM, 6)).train()
    file = tmp_path / "checkpoints" / "step-000000006" / name
    content = bytearray(file.read_bytes())
    if damage == "cut":
        content = content[: len(content) // 2]
    else:
        content[len(content) // 2] ^= 1
    file.write_bytes(content)
    again = Run(bench, tmp_path)
    again.train()
    assert "step-000000006 is damaged and removed" in capsys.readouterr().err
    assert same(again.weights, whole.weights)
    assert again.lines() == whole.lines()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"settings": SETTINGS.model_copy(update={"matrix_lr": 0.01})}, "another matrix_lr;"),
        ({"settings": SETTINGS.model_copy(update={"tokens": 600})}, "another tokens;"),
        ({"seed": 4}, "another seed;"),
        ({"start": 1.01}, "another start of the weights;"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_by_name(
    bench: Bench, tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    with pytest.raises(Stopped):
        Run(bench, tmp_path, on_step=kill(signal.SIGTERM, 2)).train()
    with pytest.raises(UserError, match=named):
        Run(bench, tmp_path, **change).train()


def test_a_start_that_is_the_same_but_for_rounding_is_no_other_start(bench: Bench, whole: Run, tmp_path: Path) -> None:
    """Singular vectors come out otherwise in their last digits when another number of threads computes them."""
    with pytest.raises(Stopped):
        Run(bench, tmp_path, on_step=kill(signal.SIGTERM, 2)).train()
    again = Run(bench, tmp_path, start=1.000001)
    again.train()
    assert same(again.weights, whole.weights)


def test_how_often_is_saved_may_change_between_the_parts_of_a_run(bench: Bench, whole: Run, tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        Run(bench, tmp_path, on_step=kill(signal.SIGTERM, 2)).train()
    again = Run(bench, tmp_path, SETTINGS.model_copy(update={"checkpoint_every": 1}))
    again.train()
    assert same(again.weights, whole.weights)


def test_a_checkpoint_holds_what_is_trained_in_fp32_and_nothing_of_the_target(bench: Bench, tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        Run(bench, tmp_path, on_step=kill(signal.SIGTERM, 2)).train()
    tensors = checkpoint.Checkpoints(tmp_path / "checkpoints").read(tmp_path / "checkpoints" / "step-000000002")[1]
    head = a_head(bench.target)
    assert set(tensors["weights"]) == {f"eagle.{name}" for name, _ in head.named_parameters()}
    assert sum(t.numel() for t in tensors["weights"].values()) == sum(p.numel() for p in head.parameters())
    assert {t.dtype for name in ("weights", "optimizer") for t in tensors[name].values()} == {torch.float32}
    steps = [value for name, value in tensors["optimizer"].items() if name.endswith("/step")]
    assert {float(step) for step in steps} == {2.0}


class Stub:
    """An evaluator that says what it was told to."""

    batches: tuple[()] = ()

    def __init__(self, target: Target, *values: float) -> None:
        self.target, self.values = target, iter([0.0, *values])

    def expected_acceptance(self, objective: Any) -> list[float]:
        return [next(self.values)]

    def match(self, objective: Any) -> float:
        return 0.5


def test_the_best_weights_are_those_of_the_best_validation_and_best_and_last_are_named(
    bench: Bench, tmp_path: Path
) -> None:
    run = Run(bench, tmp_path, held_out=Stub(bench.target, 3.28, 3.34, 3.33, 3.24))
    summary = run.train()
    validated = [line for line in run.lines() if "held_out_run_length" in line]
    assert [line["held_out_run_length"] for line in validated] == [3.28, 3.34, 3.33, 3.24]
    second, last = validated[1]["step"], validated[3]["step"]
    assert [line["best_step"] for line in validated] == [validated[0]["step"], second, second, second]
    assert (summary.best_step, summary.steps) == (second, last)
    assert (summary.expected_acceptance, summary.last) == ([3.34], [3.24])
    assert not same(run.kept, run.weights)


def test_patience_ends_a_run_that_gets_no_better(bench: Bench, tmp_path: Path) -> None:
    settings = SETTINGS.model_copy(update={"patience": 1})
    summary = Run(bench, tmp_path, settings, held_out=Stub(bench.target, 3.28, 3.34, 3.33, 3.24)).train()
    assert summary.last == [3.33]
    assert summary.best_step < summary.steps


def test_a_run_that_reaches_its_end_is_not_said_to_stop_early(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = SETTINGS.model_copy(update={"patience": 2})
    summary = Run(bench, tmp_path, settings, held_out=Stub(bench.target, 3.28, 3.34, 3.33, 3.24)).train()
    assert (summary.last, summary.expected_acceptance) == ([3.24], [3.34])
    assert "stops early" not in capsys.readouterr().err


def test_the_last_step_is_validated_also_when_it_is_the_only_one_to_be(bench: Bench, tmp_path: Path) -> None:
    settings = SETTINGS.model_copy(update={"validations": 1})
    run = Run(bench, tmp_path, settings, held_out=Stub(bench.target, 0.1))
    summary = run.train()
    assert summary.best_step == summary.steps == len(run.rows)
    assert same(run.kept, run.weights)


def test_patience_that_could_stop_nothing_is_refused() -> None:
    for patience, validations in ((1, 2), (3, 4), (1, 1)):
        with pytest.raises(ValidationError, match=f"patience: {patience} can stop nothing.*{patience + 2} or more"):
            TrainSettings(patience=patience, validations=validations)
    assert TrainSettings(patience=2, validations=4).patience == 2
