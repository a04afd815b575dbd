"""What all heads on a target share as files: a strict reader and an atomic writer of `config.json` and `model.safetensors`.

A head holds no weights of its target; it names the target that it was made for. Knows nothing of what a head computes.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Protocol, TypeVar, get_type_hints

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from draftsmith.errors import UserError, first_line, listed
from draftsmith.files import publish, publish_json
from draftsmith.models.fields import MOST
from draftsmith.models.target import Target
from draftsmith.models.vocabulary import DraftVocabulary

Head = TypeVar("Head", bound=nn.Module)
Made = TypeVar("Made")
#: Types of weights. Any other is of a quantised head, whose numbers mean nothing without their scales.
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class HeadConfig(Protocol):
    """What every head's configuration says of its target."""

    @property
    def kind(self) -> str: ...

    @property
    def target_width(self) -> int: ...

    @property
    def target_vocabulary(self) -> int: ...

    @property
    def target_fingerprint(self) -> str: ...


def save_head(head: nn.Module, config: Any, vocabulary: DraftVocabulary, folder: Path) -> None:
    """Write a head's own weights, its vocabulary's maps and its configuration. Each file is atomic."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in head.state_dict().items()}
    tensors |= {"d2t": vocabulary.d2t, "t2d": vocabulary.t2d}
    publish(folder / "model.safetensors", lambda path: save_file(tensors, path, metadata={"format": "pt"}))
    publish_json(folder / "config.json", asdict(config))


def head_kind(folder: Path) -> str | None:
    """`kind` of the head in a folder; None where there is no head."""
    kind = _said(folder).get("kind")
    return kind if isinstance(kind, str) else None


def foreign_head(folder: Path) -> str:
    """The class of the head that a folder holds in the layout of an engine; "" where it holds none."""
    named = _said(folder).get("architectures")
    names = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    return next((name for name in names if "eagle" in name.lower() or "medusa" in name.lower()), "")


def _said(folder: Path) -> dict[str, Any]:
    """What config.json says; nothing where it cannot be read."""
    try:
        said = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return said if isinstance(said, dict) else {}


def read_config(folder: Path, config_type: type) -> Any:
    """The configuration of the head in a folder. Raises UserError where it cannot be read or describes no possible head."""
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        values = _typed(raw, config_type, folder)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        reason = first_line(error)
        raise UserError(f"{folder}: not a readable head ({reason}); make it again or name another folder") from error
    return _possible(lambda: config_type(**values), folder)


def load_head(folder: Path, config_type: type, build: Callable[[Any, DraftVocabulary], Head], target: Target) -> Head:
    """Read a head and attach it to its target, on its device and in its dtype. `build` makes it from configuration and vocabulary.

    Raises UserError where the files cannot be read, are another target's, describe an impossible head, or lack a tensor.
    """
    config = read_config(folder, config_type)
    try:
        tensors = load_file(folder / "model.safetensors")
        d2t, t2d = tensors.pop("d2t"), tensors.pop("t2d")
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else first_line(error)
        raise UserError(f"{folder}: not a readable head ({reason}); make it again or name another folder") from error
    check_target(config, target, str(folder))
    check_weights(tensors, f"{folder}/model.safetensors")
    vocabulary = _vocabulary(d2t, t2d, config.target_vocabulary, folder)
    if getattr(config, "layers", config.heads) > len(tensors):  # so many need hours to be made, even without weights
        raise UserError(f"{folder}/config.json: more layers or heads than model.safetensors has tensors; restore it")
    # The weights say how much memory a head may take, not its configuration.
    hollow = _hollow(build, config, vocabulary, folder)
    _check_shapes({name: value.shape for name, value in hollow.state_dict().items()}, tensors, folder)
    head = _possible(lambda: build(config, vocabulary), folder)
    head.load_state_dict(tensors)
    head.to(target.device)
    for parameter in head.parameters():  # weights alone: RoPE's frequencies lose whole turns in half precision
        parameter.data = parameter.data.to(target.dtype)
    return head


def head_shape(folder: Path, config_type: type, build: Callable[[Any, DraftVocabulary], Head], target: Target) -> Head:
    """The head that `load_head` would read, without its weights (on torch's meta device): its configuration alone is read.

    Raises UserError as `load_head` does, but for what the weights tell.
    """
    config = read_config(folder, config_type)
    check_sizes(config, target, str(folder))
    any_tokens = torch.arange(config.draft_vocabulary)  # which, does not matter
    return _hollow(build, config, DraftVocabulary(any_tokens, config.target_vocabulary), folder)


def _hollow(
    build: Callable[[Any, DraftVocabulary], Head], config: Any, vocabulary: DraftVocabulary, folder: Path
) -> Head:
    """The head without its weights."""
    with torch.device("meta"):
        return _possible(lambda: build(config, vocabulary), folder)


def _possible(make: Callable[[], Made], folder: Path) -> Made:
    """What `make` returns. Raises UserError naming the folder where the configuration's values are no head's."""
    try:
        return make()
    except (
        UserError,
        StrictDataclassError,
        RuntimeError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        ArithmeticError,
    ) as error:
        reason = str(error) if isinstance(error, UserError) else first_line(error)
        raise UserError(f"{folder}/config.json: not a possible head ({reason}); restore it") from error


def _typed(raw: Any, config_type: type, folder: Path) -> dict[str, Any]:
    """A configuration's values, lists as tuples. Raises UserError naming one that is of another type or missing."""
    place, hints = f"{folder}/config.json", get_type_hints(config_type)
    if unknown := sorted(raw.keys() - hints.keys()):
        raise UserError(f"{place}: not a readable head ({unknown[0]} is no field of this version's); restore the file")
    for field in fields(config_type):
        kind, value = hints[field.name], raw.get(field.name, field.default)
        if kind is int:
            fits = type(value) is int and 0 <= value <= MOST
        elif kind is float:
            fits = type(value) in (int, float) and 0 < value < MOST
        elif kind in (str, bool):
            fits = type(value) is kind
        elif field.name == "taps":
            fits = isinstance(value, list) and all(type(tap) is int and 0 <= tap <= MOST for tap in value)
            fits = fits and sorted(set(value)) == value
        else:
            fits = isinstance(value, dict)
        if not fits:
            said = "missing" if field.name not in raw else f"{str(value)[:60]!r}, which it cannot be"
            raise UserError(f"{place}: {field.name} is {said}; restore the file, or train the head again")
    return {key: tuple(value) if isinstance(value, list) else value for key, value in raw.items()}


def _vocabulary(d2t: Tensor, t2d: Tensor, size: int, folder: Path) -> DraftVocabulary:
    """The draft vocabulary of a head's maps. Raises UserError for maps that are none, or that contradict each other."""
    place = f"{folder}/model.safetensors"
    if d2t.dtype != torch.int64 or d2t.ndim != 1 or bool((d2t.abs() > size).any()):
        raise UserError(
            f"{place}: d2t: must be one row of 64-bit offsets within the target's {size} tokens; restore it"
        )
    try:
        vocabulary = DraftVocabulary(d2t + torch.arange(len(d2t)), size)
    except UserError as error:
        raise UserError(f"{place}: d2t: {error}; restore it") from error
    if t2d.dtype != torch.bool or not torch.equal(t2d, vocabulary.t2d):
        raise UserError(f"{place}: t2d: is not true exactly at the ids of d2t; restore it")
    return vocabulary


def check_weights(tensors: Mapping[str, Tensor], place: str) -> None:
    """Raises UserError naming the first tensor whose numbers cannot be weights: quantised ones, NaN, infinity."""
    for name, value in tensors.items():
        if value.is_floating_point() and value.dtype not in FLOATS:
            kind = str(value.dtype).removeprefix("torch.")
            raise UserError(f"{place}: {name} is stored as {kind}: quantised weights; take the head as it was before")
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise UserError(f"{place}: {name}: holds NaN or infinity; get the weights again")


def check_sizes(config: HeadConfig, target: Target, name: str) -> None:
    """Raises UserError for a head that was made for a target of other sizes."""
    if (config.target_width, config.target_vocabulary) != (target.width, target.vocabulary):
        raise UserError(
            f"{name}: made for a target of width {config.target_width} and {config.target_vocabulary} tokens, "
            f"not {target.width} and {target.vocabulary}; name the target that it was made for"
        )
    taps = getattr(config, "taps", ())
    if taps and max(taps) >= target.blocks:
        raise UserError(
            f"{name}: taps {list(taps)} of a target with {target.blocks} blocks (from 0); restore its config.json"
        )


def check_target(config: HeadConfig, target: Target, name: str) -> None:
    """Raises UserError for a head that was made for another target, or for one of other sizes."""
    check_sizes(config, target, name)
    if config.target_fingerprint not in ("", target.fingerprint()):
        raise UserError(
            f"{name}: made for target {config.target_fingerprint}, not {target.fingerprint()}; train it again"
        )


def _check_shapes(expected: Mapping[str, torch.Size], tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Raises UserError naming every tensor that is missing, extra, of another shape or no float."""
    found = {name: value.shape if value.is_floating_point() else None for name, value in tensors.items()}
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name, 0) != found.get(name, 0))
    if wrong:
        raise UserError(
            f"{folder}/model.safetensors: missing, extra, no float or of another shape: {listed(wrong)}; restore it, or config.json"
        )
