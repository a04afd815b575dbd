"""Tracking never stops training: no account, no network, a tracker that raises."""

import warnings
from pathlib import Path
from typing import Any

import pytest

from draftsmith.errors import UserError
from draftsmith.tracking import Tracking, has_account


class Recorder:
    """A tracker that remembers, and raises from the n-th value on."""

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
