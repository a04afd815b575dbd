"""The stages of a run as units of work: what each depends on, what it leaves behind, and the one call that does it.

    target → prepare → cache → distill, train-eagle → eval-acceptance → report
                                                    → tune

Knows the order, and when a stage need not run again; what each call does is in `work.py`.
"""

import functools
import platform
from pathlib import Path
from typing import Any

from draftsmith.config import Config
from draftsmith.errors import UserError
from draftsmith.eval.settings import checked_folder, is_folder, result_name
from draftsmith.run import Unit, stamp
from draftsmith.work import TRAINED, Work, served

TRAINING_INPUTS = ("target", "prepare", "cache")  # the held-out rows choose the weights that are kept
# Settings that change how fast a stage is and not what it makes: to change one is no reason to run again.
SPEED = {"cache": {"batch_tokens"}, "training": {"checkpoint_every", "bad_rows"}}


def stage_units(config: Config, work: Work) -> list[Unit]:
    """All units of a config in an order in which each comes after its inputs."""
    resolved = config.model_dump(mode="json")
    data, seed = config.data.lasting() | {"content": data_content(config)}, config.seed
    of_cache = {key: value for key, value in resolved["cache"].items() if key not in SPEED["cache"]}
    units = [
        _target_unit(config, work, data),
        Unit("prepare", "", {"data": data}, ("target",), ("rows",), work.prepare),
        Unit(
            "cache",
            "",
            {"cache": of_cache, "dtype": config.target.dtype} | _imported(config),
            ("target", "prepare"),
            () if config.cache.online else ("cache",),
            work.cache,
            resumes=True,
            ranks=config.cache.imported is None,
        ),
        Unit(
            "distill",
            "",
            {"distill": _lasting(resolved["distill"]), "seed": seed, "content": _drafts_read(config)},
            TRAINING_INPUTS,
            ("draft",),
            work.distill,
            ranks=True,
            saved="draft/checkpoints",
        ),
    ]
    for name, settings in resolved["eagle"].items():
        train = functools.partial(work.train_eagle, name)
        units.append(
            Unit(
                "train-eagle",
                name,
                {"eagle": _lasting(settings), "seed": seed} | _started(config.eagle[name].start),
                TRAINING_INPUTS,
                (f"eagle/{name}",),
                train,
                ranks=True,
                saved=f"eagle/{name}/checkpoints",
            )
        )
    if config.evaluation.questions is not None:
        resolved["evaluation"]["content"] = stamp(Path(config.evaluation.questions).expanduser(), content=True)
    measured = {key: value for key, value in resolved["evaluation"].items() if key != "drafts"}
    for draft in dict.fromkeys(config.evaluation.drafts):
        inputs = ("target", "prepare", *_trained_by(draft, config))
        evaluate = functools.partial(work.evaluate, draft)
        name = result_name(draft)
        units.append(
            Unit(
                "eval-acceptance",
                name,
                {"evaluation": measured, "dtype": config.target.dtype} | _measured(draft),
                inputs,
                (f"eval/{name}.json",),
                evaluate,
            )
        )
    units.append(_tune_unit(config, work, resolved))
    results = tuple(unit.key for unit in units if unit.stage == "eval-acceptance")
    units.append(
        Unit("report", "", {"drafts": list(config.evaluation.drafts)}, results, ("report.html", "plots"), work.report)
    )
    return units


def _tune_unit(config: Config, work: Work, resolved: dict[str, Any]) -> Unit:
    """Chooses among the drafts of the evaluation that could serve, on its prompts."""
    drafts = served(config)
    inputs = dict.fromkeys(key for draft in drafts for key in _trained_by(draft, config))
    settings = {key: resolved[key] for key in ("tune", "evaluation")} | {"dtype": config.target.dtype}
    settings |= {f"content of {draft}": mark for draft in drafts for mark in _measured(draft).values()}
    outputs = ("tune.json", "skill-speculative-tuning.md")
    return Unit("tune", "", settings, ("target", "prepare", *inputs), outputs, work.tune)


def _lasting(training: dict[str, Any]) -> dict[str, Any]:
    """The settings of a training that its result depends on."""
    return {key: value for key, value in training.items() if key not in SPEED["training"]}


def _target_unit(config: Config, work: Work, data: dict[str, Any]) -> Unit:
    path = config.target.path
    if path is None:
        scratch = config.target.scratch.model_dump(mode="json")
        # The target learns from the whole corpus; the caps are for the rows that drafts are made from.
        whole = {key: value for key, value in data.items() if key not in ("train_tokens", "held_out_tokens")}
        settings = {"scratch": scratch, "data": whole, "seed": config.seed}
        return Unit("target", "", settings, (), ("target-rows", "target"), work.train_target)
    local = Path(path).expanduser()
    content = stamp(local, content=False) if local.exists() else "hub"
    settings = {"path": path, "content": content, "trust_remote_code": config.target.trust_remote_code}
    return Unit("target", "", settings, (), (), work.check_target)


def _imported(config: Config) -> dict[str, Any]:
    """The content of a dump that takes the place of the target's passes; nothing where there is none."""
    about = config.cache.imported
    return {} if about is None else {"dump": _stamps(about.path, about.masks)}


def _drafts_read(config: Config) -> list[str]:
    """Marks of the drafts that distillation starts from or compares with."""
    selective = config.distill.selective
    return _stamps(config.distill.checkpoint, None if selective is None else selective.reference)


def _started(folder: str | None) -> dict[str, Any]:
    """The mark of the head that a training starts from; nothing where there is none."""
    return {} if folder is None else {"content": _stamps(folder)}


def _measured(draft: str) -> dict[str, Any]:
    """The mark of a draft that is given as a folder; nothing for one of the run's own. Raises UserError where it is none."""
    return {"content": _stamps(str(checked_folder(draft, "evaluation.drafts:")))} if is_folder(draft) else {}


def _stamps(*paths: str | None) -> list[str]:
    """A mark of each local file or folder that changes when it does; hub names are taken to stand for what they stood for."""
    places = [Path(path).expanduser() for path in paths if path is not None]
    return [stamp(place, content=False) for place in places if place.exists()]


def _trained_by(draft: str, config: Config) -> tuple[str, ...]:
    if draft in (TRAINED, "untrained"):
        return ("distill",)
    return (f"train-eagle {draft}",) if draft in config.eagle else ()


def data_content(config: Config) -> list[str]:
    """One mark per source that changes when its text does: a digest of local files, or the version of Python."""
    marks = []
    for source in config.data.sources:
        if source.kind == "python":
            marks.append(f"python {platform.python_version()}")
        else:
            path = Path(source.path or "").expanduser()  # what is not here and of kind "hub" is on the hub
            try:
                marks.append("hub" if source.kind == "hub" and not path.exists() else stamp(path, content=True))
            except OSError as error:
                raise UserError(f"data.sources: {path} cannot be read ({error}); give readable files") from error
    return marks
