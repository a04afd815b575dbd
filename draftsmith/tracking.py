"""Training curves to trackers (W&B, TensorBoard, trackio), through the tracker classes of `accelerate`.

Tracking is a convenience: the curves are in the run folder anyway. So a tracker that fails, at the start or in mid-run,
is a warning and training goes on. The classes are used without an `Accelerator`: its state is global, and the training
loop's own must be free to choose precision and devices.
"""

import importlib.util
import netrc
import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftsmith.errors import UserError
from draftsmith.settings import flat, without_secrets

Log = Callable[[dict[str, float], int], None]
PACKAGES = {"wandb": "wandb", "tensorboard": "tensorboard", "trackio": "trackio"}
START_SECONDS = 30  # longer than this W&B's server is not worth waiting for


class Tracking:
    """The trackers of one command. Nothing is started before the first value is logged."""

    def __init__(
        self, names: tuple[str, ...], project: str, run: Path, config: dict[str, Any], device: str = "cpu"
    ) -> None:
        """Raises UserError when the package of a tracker is not installed."""
        for name in names:
            if importlib.util.find_spec(PACKAGES[name]) is None:
                raise UserError(
                    f"tracking.trackers: {name} is not installed; pip install {PACKAGES[name]}, or leave it out"
                )
        self._names, self._project, self._run, self._config = names, project, run, config
        self._device = device
        self._trackers: dict[str, Any] | None = None
        self._step = 0  # trackers want one rising step, and every stage counts from 0

    def log(self, stage: str) -> Log:
        """A function of (values, step) that logs each value as `stage/name`, beside `stage/step`."""
        base = self._step

        def log(values: dict[str, float], step: int) -> None:
            self._step = max(self._step, base + step + 1)
            named = {f"{stage}/{key}": value for key, value in values.items()} | {f"{stage}/step": step}
            self._each(lambda tracker: tracker.log(named, step=base + step))

        return log

    def close(self) -> None:
        """Let every tracker write what it still holds."""
        if self._trackers is not None:
            self._each(lambda tracker: tracker.finish())
            self._trackers = None

    def _each(self, act: Callable[[Any], None]) -> None:
        if self._trackers is None:
            self._trackers = self._start()
        for name, tracker in list(self._trackers.items()):
            if not _survives(name, lambda tracker=tracker: act(tracker)):  # type: ignore[misc]
                del self._trackers[name]

    def _start(self) -> dict[str, Any]:
        trackers: dict[str, Any] = {}
        for name in self._names:

            def start(name: str = name) -> None:
                tracker = self._create(name)
                if hasattr(tracker, "start"):
                    tracker.start()
                tracker.store_init_configuration(_plain_values(self._config))
                trackers[name] = tracker

            _survives(name, start)
        return trackers

    def _create(self, name: str) -> Any:
        from accelerate import PartialState
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        # The tracker classes ask it which process is the main one. Its state is shared with the training loop's
        # `Accelerator`, so both must mean the same device, whichever comes first.
        PartialState(cpu=self._device == "cpu")
        if name == "wandb":
            return LOGGER_TYPE_TO_CLASS["wandb"](self._project, **self._wandb())
        if name == "tensorboard":
            return LOGGER_TYPE_TO_CLASS["tensorboard"](self._project, logging_dir=str(self._run / "tensorboard"))
        return LOGGER_TYPE_TO_CLASS[name](self._project)

    def _wandb(self) -> dict[str, Any]:
        """Arguments of `wandb.init`: files below the run folder, nothing printed, offline where there is no account."""
        from wandb import Settings

        folder = self._run / "wandb"
        folder.mkdir(parents=True, exist_ok=True)
        mode = os.environ.get("WANDB_MODE") or ("online" if has_account() else "offline")
        quiet = Settings(
            silent=True,
            console="off",
            init_timeout=START_SECONDS,
            save_code=False,
            disable_git=True,
            x_disable_stats=True,
            x_disable_meta=True,
        )
        return {
            "name": f"{self._run.name} {time.strftime('%Y-%m-%d %H:%M')}",
            "dir": str(self._run),
            "mode": mode,
            "settings": quiet,
        }


def has_account() -> bool:
    """Whether W&B would find a key: in the environment, or in the netrc file where `wandb login` leaves it."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    place = os.environ.get("NETRC")
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("//")[-1].split("/")[0]
    candidates = [Path(place)] if place else [Path.home() / ".netrc", Path.home() / "_netrc"]
    for file in candidates:
        try:
            if netrc.netrc(str(file)).authenticators(host):
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False


def _survives(name: str, act: Callable[[], None]) -> bool:
    """Whether `act` went well. A tracker may raise anything (network, disk, its own bugs): all of it is a warning."""
    try:
        act()
    except Exception as problem:
        reason = next(iter(str(problem).strip().splitlines()), "no reason given")
        text = f"tracker {name} failed and is left out from here on ({type(problem).__name__}: {reason})"
        warnings.warn(text, RuntimeWarning, stacklevel=3)
        return False
    return True


def _plain_values(values: dict[str, Any]) -> dict[str, Any]:
    """Nested settings as dotted names with values that every tracker takes."""
    named = flat(without_secrets(values))
    return {name: value if isinstance(value, str | int | float) else str(value) for name, value in named.items()}
