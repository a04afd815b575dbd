"""The configuration: one schema put together from the stages' own settings, and its file, overrides and error messages.

A config is valid or the user reads one line that says what to change; no stage checks again what its schema promises.
What the fields of a stage mean is said beside the code that uses them.
"""

import difflib
import re
import types
import typing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from draftsmith.data.cache.manifest import CacheSettings
from draftsmith.data.corpus import DataSettings
from draftsmith.data.regenerate import RegenerateSettings
from draftsmith.errors import UserError
from draftsmith.eval.settings import EvalSettings, is_folder, result_name
from draftsmith.eval.tune_settings import TuneSettings
from draftsmith.settings import SEEDS, Settings
from draftsmith.train.settings import DistillSettings, EagleTrainSettings, ScratchSettings

#: Drafts that every run has; the names of `eagle` join them.
BUILT_IN = ("untrained", "distilled", "prompt-lookup", "oracle")
NAME = r"^[A-Za-z0-9][A-Za-z0-9_-]*$"  # a folder's name, and no dot, so that overrides can reach below it

FOLDER = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"


class TargetSettings(Settings):
    """The model p. Without `path` (a folder or hub name) the stage `target` trains one from scratch as `scratch` says.

    dtype: in which weights are loaded and forward passes are computed; device: `auto` is `cpu`. GPU devices come with a later
    version: decoding builds its tensors on the CPU. trust_remote_code: run Python code that comes with the model, off unless you
    trust its author.
    """

    path: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: str = "auto"
    trust_remote_code: bool = False
    scratch: ScratchSettings = ScratchSettings()

    @field_validator("device")
    @classmethod
    def _supported(cls, device: str) -> str:
        if device not in ("auto", "cpu"):
            raise ValueError(f"{device!r} is not supported: GPU devices come with a later version; give auto or cpu")
        return device


class TrackingSettings(Settings):
    """Where training curves go besides the run folder.

    trackers: an empty list switches tracking off; project: the name under which W&B, TensorBoard and trackio group runs.
    """

    trackers: tuple[Literal["wandb", "tensorboard", "trackio"], ...] = ("wandb",)
    project: str = Field("draftsmith", min_length=1)


class Config(Settings):
    """One experiment.

    name: of the run folder, unless given the config file's; seed: of a target from scratch and of every draft's training;
    run_root: the folder that holds run folders. target: the model p; data: what is prepared; regenerate: how the target answers
    the data's questions; cache: what of the target is kept; distill: the draft LM; eagle: heads by their names, EAGLE or Medusa;
    evaluation: what is decoded; tune: which settings are tried for serving; tracking: where training curves go.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    seed: int = Field(0, ge=0, lt=SEEDS)
    run_root: str = Field("runs", min_length=1)
    target: TargetSettings = TargetSettings()
    data: DataSettings = DataSettings()
    regenerate: RegenerateSettings = RegenerateSettings()
    cache: CacheSettings = CacheSettings()
    distill: DistillSettings = DistillSettings()
    eagle: dict[str, EagleTrainSettings] = Field(default_factory=dict)
    evaluation: EvalSettings = EvalSettings()
    tune: TuneSettings = TuneSettings()
    tracking: TrackingSettings = TrackingSettings()

    @model_validator(mode="after")
    def _names_of_drafts(self) -> Self:
        for name, head in self.eagle.items():
            if name in BUILT_IN:
                raise ValueError(f"eagle.{name}: this name is taken by a built-in draft; choose another")
            if not re.match(NAME, name):
                raise ValueError(f"eagle.{name}: a draft's name has letters, digits, - and _ only; choose another")
            if self.cache.taps == "none" and head.kind == "eagle3":
                raise ValueError(f"cache.taps: an EAGLE head (eagle.{name}) is trained on taps; use auto")
            if head.needs_last and not self.cache.last:
                raise ValueError(f"cache.last: eagle.{name} is trained on the target's last states; set it to true")
        partial = self.cache.distribution in ("topk8", "sampled") or (
            self.cache.distribution == "topk"
            and self.target.path is None
            and self.cache.k < self.target.scratch.vocabulary
        )
        for section, trained in {"distill": self.distill, **{f"eagle.{n}": s for n, s in self.eagle.items()}}.items():
            if trained.temperature != 1.0 and partial:
                raise ValueError(
                    f"{section}.temperature: {trained.temperature:g} needs the target's whole distribution; "
                    "set cache.distribution to from_last, or the temperature to 1"
                )
        known = (*BUILT_IN, *self.eagle)
        for name in self.evaluation.drafts:
            if is_folder(name) and ((named := result_name(name)) in known or not re.match(FOLDER, named)):
                raise ValueError(
                    f"evaluation.drafts: {name}: its results would be called {named!r}, which is another draft's or no name of"
                    " letters, digits, '.', - and _; rename the folder, or give a link to it"
                )
            if name not in known and not is_folder(name):
                raise ValueError(
                    f"evaluation.drafts: no draft {name!r}{_nearest(name, known)} (there are {', '.join(known)}; "
                    "a folder has a slash)"
                )
        called = [result_name(name) for name in dict.fromkeys(self.evaluation.drafts)]
        if twice := [name for name in called if called.count(name) > 1]:
            raise ValueError(
                f"evaluation.drafts: two folders are called {twice[0]!r}; rename one, or give a link to it"
            )
        return self

    @model_validator(mode="after")
    def _starts_are_not_overwritten(self) -> Self:
        """A training empties the folder that it writes before it reads where it starts."""
        selective = self.distill.selective
        read = [
            ("distill.checkpoint", self.distill.checkpoint, "draft"),
            ("distill.selective.reference", None if selective is None else selective.reference, "draft"),
            *((f"eagle.{name}.start", head.start, f"eagle/{name}") for name, head in self.eagle.items()),
        ]
        for field, given, written in read:
            place, own = Path(given or "/").expanduser().resolve(), (self.run / written).resolve()
            if own in (place, *place.parents):
                raise ValueError(
                    f"{field}: {given} is what this training would write anew; give the run or the head another name"
                )
        return self

    @property
    def run(self) -> Path:
        """The run folder."""
        return Path(self.run_root).expanduser() / self.name


@dataclass(frozen=True)
class Loaded:
    """A valid config and `given`: the part of it that the user wrote, in the file or as overrides."""

    config: Config
    given: dict[str, Any]


def embedded(name: str) -> Path:
    """The path of a config that is installed with the package, such as "demo"."""
    return Path(str(resources.files("draftsmith.configs").joinpath(f"{name}.yaml")))


def load_config(path: Path, overrides: Sequence[str] = ()) -> Loaded:
    """The config in `path` with `key.sub=value` overrides. Raises UserError: one line with file, field and remedy."""
    given = _read(path)
    for override in overrides:
        _apply(given, override)
    # A section whose every line is commented out reads as null; its defaults are meant.
    values = {"name": path.stem, **{key: value for key, value in given.items() if value is not None}}
    try:
        return Loaded(Config.model_validate(values), given)
    except ValidationError as error:
        raise UserError(_explain(error, values, path, overrides)) from error


class _Loader(yaml.SafeLoader):
    """YAML in which a key given twice is an error: the earlier value would be ignored without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        written = [
            key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"
        ]  # `<<: *anchor` may be overridden
        keys = [self.construct_object(key, deep=True) for key in written]
        for key, name in zip(written, keys, strict=True):
            if keys.count(name) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"key {name!r} is given twice", key.start_mark)
        return super().construct_mapping(node, deep)


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such config; give the path of a YAML file, such as configs/demo.yaml") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); give the path of a YAML file") from error
    try:
        values = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError, AttributeError) as error:  # ValueError: an impossible date, say
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        place = f", line {mark.line + 1}" if mark is not None else ""
        raise UserError(f"{path}{place}: not valid YAML ({problem or 'unreadable'}); correct this line") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise UserError(f"{path}: holds a {type(values).__name__}, not keys with values; write lines such as `seed: 0`")
    return values


def _apply(values: dict[str, Any], override: str) -> None:
    """Set one `key.sub=value` in `values`, in place. The value is YAML; list items are reached by their number."""
    key, equals, text = override.partition("=")
    if not equals or not all(parts := key.strip().split(".")):
        raise UserError(f"override {override!r}: write key.sub=value, such as evaluation.K=4")
    try:
        value = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError, AttributeError) as error:
        raise UserError(f"override {override!r}: the value is not valid YAML; put it in quotes") from error
    place: Any = values
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        if isinstance(place, list):
            if not part.isdigit() or int(part) >= len(place):
                raise UserError(
                    f"override {override!r}: {'.'.join(parts[:depth])} has items 0 to {len(place) - 1}, not {part}"
                )
            index: Any = int(part)
        elif isinstance(place, dict):
            index = part
        else:
            raise UserError(f"override {override!r}: {'.'.join(parts[:depth])} is a value and has no field {part}")
        if last:
            place[index] = value
        else:
            if isinstance(place, dict) and place.get(index) is None:
                place[index] = {}
            place = place[index]


def _explain(error: ValidationError, values: dict[str, Any], path: Path, overrides: Sequence[str]) -> str:
    """One line for the first fault. Unknown keys go first: what follows from a misspelt key only distracts from it."""
    faults: dict[tuple[Any, ...], list[str]] = {}
    details = sorted(error.errors(), key=lambda detail: detail["type"] != "extra_forbidden")
    for detail in details:
        place = _in_file(detail["loc"], values) if detail["type"] != "missing" else detail["loc"]
        faults.setdefault(place, []).append(_message(detail, place))
    place, messages = next(iter(faults.items()))
    dotted = ".".join(map(str, place))
    origin = [text for text in overrides if dotted and f"{dotted}.".startswith(text.partition("=")[0].strip() + ".")]
    where = f"override {origin[-1]!r}" if origin else str(path)
    more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
    text = " or ".join(dict.fromkeys(messages))
    return " ".join(f"{where}: {dotted + ': ' if dotted else ''}{text}{more}".split())


def _in_file(place: tuple[Any, ...], values: Any) -> tuple[Any, ...]:
    """`place` up to where it still names something in the file; pydantic adds the names of the types it tried."""
    known: list[Any] = []
    for part in place:
        try:
            values = values[part]
        except (KeyError, IndexError, TypeError):
            break
        known.append(part)
    return tuple(known)


def _message(detail: Any, place: tuple[Any, ...]) -> str:
    kind, text = detail["type"], detail["msg"]
    if kind == "extra_forbidden":
        return "unknown key" + _suggestion(place)
    if kind == "missing":
        return "this key is required; add it"
    if kind in ("value_error", "assertion_error"):
        return str(text.split(", ", 1)[-1])
    text = text.replace("Input should be", "must be").replace("String should", "must")
    shown = repr(detail["input"])
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return f"{text[0].lower()}{text[1:]}, got {shown}"


def _suggestion(place: tuple[Any, ...]) -> str:
    """The nearest valid key: among those at this place first, then anywhere in the schema."""
    *parents, key = place
    models = _models_at(Config, parents)
    beside = [name for model in models for name in model.model_fields]
    prefix = "".join(f"{part}." for part in parents)
    if found := _closest(str(key), beside, cutoff=0.6):
        return f"; did you mean {prefix}{found}?"
    everywhere = dict(_keys(Config))
    if found := _closest(str(key), everywhere, cutoff=0.75):
        return f"; did you mean {everywhere[found]}?"
    return f"; valid here: {', '.join(beside)}" if beside else ""


def _nearest(name: str, known: Sequence[str]) -> str:
    found = _closest(name, known, cutoff=0.6)
    return f"; did you mean {found!r}?" if found else ""


def _closest(word: str, known: Iterable[str], cutoff: float) -> str | None:
    """The known word most like `word`, upper and lower case taken as equal; None below `cutoff` (difflib's ratio)."""
    folded = {name.lower(): name for name in known}
    found = difflib.get_close_matches(word.lower(), folded, n=1, cutoff=cutoff)
    return folded[found[0]] if found else None


def _inside(annotation: Any) -> Iterator[Any]:
    """The types a value of `annotation` may hold: members of a union, items of a list, values of a dict."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType, typing.Annotated):
        for member in inner:
            yield from _inside(member)
    elif isinstance(annotation, type) and origin is None and issubclass(annotation, BaseModel):
        yield annotation


def _models_at(model: type[BaseModel], place: Sequence[Any]) -> list[type[BaseModel]]:
    """The models that may stand at `place`, from `model` down."""
    annotations: list[Any] = [model]
    for part in place:
        following: list[Any] = []
        for annotation in annotations:
            for found in _inside(annotation):
                if part in found.model_fields:
                    following.append(found.model_fields[part].annotation)
            if typing.get_origin(annotation) in (dict, list, tuple):
                following += [inner for inner in typing.get_args(annotation) if inner is not Ellipsis]
        annotations = following
    return [found for annotation in annotations for found in _inside(annotation)]


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """(key, dotted path) of every field below `model`, deepest first, so that in a dict the shallowest wins."""
    for name, field in model.model_fields.items():
        for inner in _inside(field.annotation):
            yield from _keys(inner, f"{prefix}{name}.")
    for name in model.model_fields:
        yield name, f"{prefix}{name}"
