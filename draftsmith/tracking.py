"""Training curves and evaluations to trackers (W&B, TensorBoard, trackio), through the tracker classes of `accelerate`.

Tracking is a convenience: the curves are in the run folder anyway. So a tracker that fails, at the start or in mid-run,
is a warning and training goes on. What is logged under which names says `draftsmith.tracked`. The classes are used without
an `Accelerator`: its state is global, and the training loop's own must be free to choose precision and devices.
"""

import importlib.util
import io
import netrc
import os
import re
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith.errors import UserError
from draftsmith.settings import flat, without_secrets
from draftsmith.tracked import evaluation_values

if TYPE_CHECKING:
    from draftsmith.eval.figures import Plot
    from draftsmith.eval.results import Result

Log = Callable[[dict[str, float], int], None]
PACKAGES = {"wandb": "wandb", "tensorboard": "tensorboard", "trackio": "trackio"}
HANGS_AFTER = 120  # seconds without an answer, then a tracker is given up
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

    def results(self, draft: str, entries: Sequence[dict[str, Any]]) -> None:
        """The numbers of one draft's evaluation (`results` of docs/conventions.md)."""
        values = {name: value for entry in entries for name, value in evaluation_values(draft, entry).items()}
        step, self._step = self._step, self._step + 1
        self._each(lambda tracker: tracker.log(values, step=step))

    def report(self, results: "Sequence[Result]", page: Path) -> None:
        """The run's results as tables, n_alpha as pictures, and the page: whole where a tracker can hold them."""
        from draftsmith.eval.heat_maps import heat_maps

        rows, depths = result_rows(results), depth_rows(results)
        step, self._step = self._step, self._step + 1
        pictures = heat_maps(results) if self._names else []
        self._each(lambda tracker: _log_report(tracker, rows, depths, pictures, page, step))

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
            "group": self._run.name,  # the commands of one run folder stand together
            "settings": quiet,
        }


Rows = tuple[list[str], list[list[Any]]]  # columns, and a value for each


def result_rows(results: "Sequence[Result]") -> Rows:
    """One row per result: what it is of, and each metric with its interval and count."""
    columns = ["draft", "domain", "temperature", "drafting", "K", "tree", "prompts", "verifies", "identical"]
    metrics = ("alpha", "tokens_per_verify", "speedup")
    rows = []
    for result in results:
        same = None if result.identical is None else "/".join(map(str, result.identical))
        setting = [result.temperature, result.drafting, result.K, result.tree, result.prompts, result.verifies, same]
        measures = [getattr(result, metric) for metric in metrics]
        numbers = [
            value for m in measures for value in ((None,) * 4 if m is None else (m.value, m.low, m.high, m.count))
        ]
        rows.append([result.draft, result.domain, *setting, *numbers])
    return [*columns, *(f"{m}{side}" for m in metrics for side in ("", "_low", "_high", "_count"))], rows


def depth_rows(results: "Sequence[Result]") -> Rows:
    """n_alpha: one row per result and position."""
    columns = ["draft", "domain", "temperature", "drafting", "position", "n_alpha", "low", "high", "count"]
    return columns, [
        [r.draft, r.domain, r.temperature, r.drafting, k, measure.value, measure.low, measure.high, measure.count]
        for r in results
        for k, measure in enumerate(r.n_alpha)
    ]


def _log_report(tracker: Any, rows: Rows, depths: Rows, heat_maps: "Sequence[Plot]", page: Path, step: int) -> None:
    from matplotlib.image import imread

    pictures = [(imread(io.BytesIO(plot.png))[..., :3] * 255).round().astype("uint8") for plot in heat_maps]
    tables = {"eval/results": rows, "eval/n_alpha": depths}
    if tracker.name == "wandb":
        import wandb

        images = [wandb.Image(picture, caption=plot.title) for picture, plot in zip(pictures, heat_maps, strict=True)]
        values = {name: wandb.Table(columns=columns, data=data) for name, (columns, data) in tables.items()}
        pages = {
            "eval/n_alpha_heat_map": images,
            "eval/report": wandb.Html(page.read_text(encoding="utf-8"), inject=False),
        }
        tracker.run.log(values | pages, step=step)
        artifact = wandb.Artifact(f"{_artifact_name(page.parent.name)}-report", type="report")
        artifact.add_file(str(page))
        tracker.run.log_artifact(artifact)
    elif tracker.name == "tensorboard":
        for name, (columns, data) in tables.items():
            tracker.writer.add_text(name, _markdown(columns, data), step)
        for number, picture in enumerate(pictures):
            tracker.writer.add_image(f"eval/n_alpha_heat_map/{number}", picture, step, dataformats="HWC")
        tracker.writer.flush()
    # trackio holds numbers alone.


def _artifact_name(text: str) -> str:
    return re.sub(r"[^\w.-]+", "-", text)


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    cells = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in row) + " |" for row in cells)


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
    """Whether `act` went well. A tracker may raise anything (network, disk, its own bugs) or never return: all of it is a warning.

    It acts in a thread of its own, which is given up where it hangs and does not keep the process from ending.
    """
    problems: list[BaseException] = [TimeoutError(f"no answer in {HANGS_AFTER:g} s")]

    def tried() -> None:
        try:
            act()
        except BaseException as problem:  # one that ends its thread must not end the training
            problems.append(problem)
        else:
            problems.clear()

    thread = threading.Thread(target=tried, name=f"tracker-{name}", daemon=True)
    thread.start()
    thread.join(HANGS_AFTER)
    if not (found := problems[-1:]):
        return True
    reason = next(iter(str(found[0]).strip().splitlines()), "no reason given")
    text = f"tracker {name} failed and is left out from here on ({type(found[0]).__name__}: {reason})"
    warnings.warn(text, RuntimeWarning, stacklevel=3)
    return False


def _plain_values(values: dict[str, Any]) -> dict[str, Any]:
    """Nested settings as dotted names with values that every tracker takes."""
    named = flat(without_secrets(values))
    return {name: value if isinstance(value, str | int | float) else str(value) for name, value in named.items()}
