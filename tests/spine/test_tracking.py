"""Tracking never stops training: no account, no network, a tracker that raises. FAULTS 66."""

import importlib.util
import json
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
from offline import wandb_records, wandb_values
from pages import entry, write

from draftsmith.errors import UserError
from draftsmith.eval.results import load_results
from draftsmith.tracking import Tracking, has_account


class Recorder:
    """A tracker that remembers, and raises from the n-th value on."""

    name = "recorder"

    def __init__(self, fails_at: int = 10**9) -> None:
        self.seen: list[tuple[dict[str, Any], int]] = []
        self.fails_at, self.finished = fails_at, False

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.config = values

    def log(self, values: dict[str, Any], step: int) -> None:
        if len(self.seen) == self.fails_at:
            raise ConnectionError("the server went away\nwith details")
        self.seen.append((values, step))

    def finish(self) -> None:
        self.finished = True


def tracking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **trackers: Any) -> Tracking:
    made = Tracking((), "draftsmith", tmp_path, {"distill": {"tokens": 5, "blocks": None}})
    made._names = tuple(trackers)

    def create(name: str) -> Any:
        if isinstance(trackers[name], Exception):
            raise trackers[name]
        return trackers[name]

    monkeypatch.setattr(made, "_create", create)
    return made


def test_values_are_named_by_stage_and_steps_rise_over_all_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    made = tracking(tmp_path, monkeypatch, one=recorder)
    log = made.log("distill")
    for step in (1, 2):
        log({"loss": 2.0}, step)
    made.log("eagle3")({"loss": 3.0}, 1)
    made.close()
    assert recorder.seen[0] == ({"distill/loss": 2.0, "distill/step": 1}, 1)
    assert recorder.seen[2][0] == {"eagle3/loss": 3.0, "eagle3/step": 1}
    steps = [step for _, step in recorder.seen]
    assert steps == sorted(set(steps))
    assert recorder.config == {"distill.tokens": 5, "distill.blocks": "None"}
    assert recorder.finished


def test_a_tracker_that_raises_in_mid_run_is_one_warning_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, sound = Recorder(fails_at=1), Recorder()
    log = tracking(tmp_path, monkeypatch, broken=broken, sound=sound).log("distill")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(5):
            log({"loss": 1.0}, step)
    assert len(sound.seen) == 5
    assert [str(warning.message) for warning in caught] == [
        "tracker broken failed and is left out from here on (ConnectionError: the server went away)"
    ]


def test_a_tracker_that_cannot_start_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tracking(tmp_path, monkeypatch, broken=OSError("no network"))
    with pytest.warns(RuntimeWarning, match="tracker broken failed"):
        made.log("distill")({"loss": 1.0}, 0)
    made.close()


@pytest.mark.parametrize("where", ["start", "log", "finish"])
def test_a_tracker_that_hangs_or_ends_its_process_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr("draftsmith.tracking.HANGS_AFTER", 0.05)
    forever, sound = threading.Event(), Recorder()
    hangs, ends = Recorder(), Recorder()
    monkeypatch.setattr(hangs, where, lambda *_, **__: forever.wait(), raising=False)
    monkeypatch.setattr(ends, where, lambda *_, **__: sys.exit(3), raising=False)
    made = tracking(tmp_path, monkeypatch, hangs=hangs, ends=ends, sound=sound)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made.log("distill")({"loss": 1.0}, 0)
        made.close()
    forever.set()
    assert sound.seen
    assert sound.finished
    assert [str(warning.message) for warning in caught] == [
        "tracker hangs failed and is left out from here on (TimeoutError: no answer in 0.05 s)",
        "tracker ends failed and is left out from here on (SystemExit: 3)",
    ]


def test_nothing_is_started_before_the_first_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = tracking(tmp_path, monkeypatch, broken=OSError("no network"))
    with warnings.catch_warnings(record=True) as caught:  # to start it would be a warning, as the test above shows
        warnings.simplefilter("always")
        made.log("distill")
        made.close()
    assert caught == []


def test_a_tracker_that_is_not_installed_is_named_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="trackio is not installed"):
        Tracking(("trackio",), "draftsmith", tmp_path, {})


def test_wandb_is_offline_without_an_account_and_its_files_lie_in_the_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    made = Tracking(("wandb",), "draftsmith", tmp_path / "run", {})
    assert made._wandb()["mode"] == "offline"
    assert made._wandb()["dir"] == str(tmp_path / "run")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert made._wandb()["mode"] == "online"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert made._wandb()["mode"] == "disabled"


def test_an_account_is_found_where_wandb_login_leaves_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_BASE_URL", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert not has_account()
    (tmp_path / "netrc").write_text("machine api.wandb.ai\n  login user\n  password 0\n")
    assert has_account()


def test_a_real_offline_run_writes_its_curve_below_the_run_folder_and_prints_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    made = Tracking(("wandb",), "draftsmith", tmp_path, {"seed": 0})
    made.log("distill")({"loss": 1.0}, 1)
    made.close()
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    out, err = capfd.readouterr()
    assert out + err == ""


def an_evaluation(tmp_path: Path) -> tuple[list[dict[str, Any]], Any, Path]:
    """Entries, the results that are read from them, and the page."""
    warm = {"temperature": 1.0, "identical": None, "drafting": "sampled"}
    entries = [entry("code", 2.4, 1.3, drafting="greedy"), entry("code", 1.6, **warm)]
    write(tmp_path, eagle3=entries)
    page = tmp_path / "report.html"
    page.write_text("<!doctype html>the page")
    return entries, load_results(tmp_path), page


def test_an_evaluation_is_read_back_from_an_offline_wandb_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers, both tables with every row, a picture for each domain, and the page as it is."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    entries, results, page = an_evaluation(tmp_path)
    made = Tracking(("wandb",), "draftsmith", tmp_path, {})
    made.results("eagle3", entries)
    made.report(results, page)
    made.close()
    [file] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    logged = wandb_values(file)
    assert logged["eval/eagle3/code/T0/tokens_per_verify"] == 2.4
    assert logged["eval/eagle3/code/T0/identical"] == 1.0
    assert logged["eval/eagle3/code/T1/alpha"] == 0.7
    media = file.parent / "files"
    table = json.loads((media / logged["eval/results"]["path"]).read_text())
    by_name = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert [(row["domain"], row["temperature"], row["tokens_per_verify"]) for row in by_name] == [
        ("code", 0.0, 2.4),
        ("code", 1.0, 1.6),
    ]
    depths = json.loads((media / logged["eval/n_alpha"]["path"]).read_text())
    assert len(depths["data"]) == 10
    assert len(logged["eval/n_alpha_heat_map"]["filenames"]) == 1
    assert (media / logged["eval/report"]["path"]).read_text() == page.read_text()
    artifacts = [record.artifact for record in wandb_records(file) if record.HasField("artifact")]
    assert any(artifact.type == "report" for artifact in artifacts)


def test_trackio_is_given_the_numbers_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    recorder.name = "trackio"
    entries, results, page = an_evaluation(tmp_path)
    made = tracking(tmp_path, monkeypatch, trackio=recorder)
    made.results("eagle3", entries)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made.report(results, page)
    [(values, _)] = recorder.seen
    assert values["eval/eagle3/code/T0/speedup"] == 1.3


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="needs tensorboard")
def test_curves_tables_and_pictures_are_read_back_from_a_tensorboard_file(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    entries, results, page = an_evaluation(tmp_path)
    made = Tracking(("tensorboard",), "draftsmith", tmp_path, {"seed": 0})
    log = made.log("distill")
    for step in (1, 2):
        log({"loss": 3.0 - step}, step)
    made.results("eagle3", entries)
    made.report(results, page)
    made.close()
    read = EventAccumulator(str(tmp_path / "tensorboard" / "draftsmith"))
    read.Reload()
    assert [event.value for event in read.Scalars("distill/loss")] == [2.0, 1.0]
    assert [event.value for event in read.Scalars("eval/eagle3/code/T0/tokens_per_verify")] == pytest.approx([2.4])
    [text] = read.Tensors("eval/results/text_summary")
    assert b"| eagle3 | code | 0.0 |" in text.tensor_proto.string_val[0]
    assert read.Images("eval/n_alpha_heat_map/0")[0].width > 100


@pytest.mark.parametrize(("device", "cpu"), [("cpu", True), ("cuda", False)])
def test_trackers_and_training_mean_the_same_device(
    device: str, cpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state of `accelerate` is shared: made for another device first, it would be the training loop's too."""
    asked: list[bool] = []
    monkeypatch.setattr("accelerate.PartialState", lambda cpu=False: asked.append(cpu))
    monkeypatch.setattr("accelerate.tracking.LOGGER_TYPE_TO_CLASS", {"trackio": lambda project: Recorder()})
    made = Tracking((), "draftsmith", tmp_path, {}, device)
    made._create("trackio")
    assert asked == [cpu]
