"""What all heads on a target share as files: a strict reader and an atomic writer of `config.json` and `model.safetensors`.

A head holds no weights of its target; it names the target that it was made for. Knows nothing of what a head computes.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from draftsmith.errors import UserError, first_line
from draftsmith.files import publish, publish_json
from draftsmith.models.target import Target
from draftsmith.models.vocabulary import DraftVocabulary

Head = TypeVar("Head", bound=nn.Module)


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
    try:
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("kind")
    except (OSError, ValueError, AttributeError):
        return None
    return kind if isinstance(kind, str) else None


def read_config(folder: Path, config_type: type) -> Any:
    """The configuration of the head in a folder. Raises UserError where it cannot be read or describes no possible head."""
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return config_type(**{key: tuple(value) if isinstance(value, list) else value for key, value in raw.items()})
    except (OSError, ValueError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise UserError(f"{folder}: not a readable head ({error}); make it again or name another folder") from error


def load_head(folder: Path, config_type: type, build: Callable[[Any, DraftVocabulary], Head], target: Target) -> Head:
    """Read a head and attach it to its target, on its device and in its dtype. `build` makes it from configuration and vocabulary.

    Raises UserError where the files cannot be read, are another target's, describe an impossible head, or lack a tensor.
    """
    config = read_config(folder, config_type)
    try:
        tensors = load_file(folder / "model.safetensors")
        d2t, _ = tensors.pop("d2t"), tensors.pop("t2d")
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        raise UserError(f"{folder}: not a readable head ({error}); make it again or name another folder") from error
    check_target(config, target, str(folder))
    head = _built(build, config, DraftVocabulary(d2t + torch.arange(len(d2t)), config.target_vocabulary), folder)
    _fill(head, tensors, folder, target)
    return head


def head_shape(folder: Path, config_type: type, build: Callable[[Any, DraftVocabulary], Head], target: Target) -> Head:
    """The head that `load_head` would read, without its weights (on torch's meta device): its configuration alone is read.

    Raises UserError as `load_head` does, but for what the weights tell.
    """
    config = read_config(folder, config_type)
    check_sizes(config, target, str(folder))
    vocabulary = DraftVocabulary(
        torch.arange(config.draft_vocabulary), config.target_vocabulary
    )  # which, does not matter
    with torch.device("meta"):
        return _built(build, config, vocabulary, folder)


def _built(
    build: Callable[[Any, DraftVocabulary], Head], config: Any, vocabulary: DraftVocabulary, folder: Path
) -> Head:
    try:
        return build(config, vocabulary)
    except (
        StrictDataclassError,
        RuntimeError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        ArithmeticError,
    ) as error:
        reason = first_line(error)
        raise UserError(f"{folder}/config.json: not a possible head ({reason}); restore it") from error


def check_sizes(config: HeadConfig, target: Target, name: str) -> None:
    """Raises UserError for a head that was made for a target of other sizes."""
    if (config.target_width, config.target_vocabulary) != (target.width, target.vocabulary):
        raise UserError(
            f"{name}: made for a target of width {config.target_width} and {config.target_vocabulary} tokens, "
            f"not {target.width} and {target.vocabulary}"
        )


def check_target(config: HeadConfig, target: Target, name: str) -> None:
    """Raises UserError for a head that was made for another target, or for one of other sizes."""
    check_sizes(config, target, name)
    if config.target_fingerprint not in ("", target.fingerprint()):
        raise UserError(
            f"{name}: made for target {config.target_fingerprint}, not {target.fingerprint()}; train it again"
        )


def _fill(head: nn.Module, tensors: dict[str, Tensor], folder: Path, target: Target) -> None:
    """Load weights into a head, on the target's device and in its dtype. Raises UserError naming every misfit."""
    expected = {name: value.shape for name, value in head.state_dict().items()}
    found = {name: value.shape for name, value in tensors.items()}
    if expected != found:
        wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        raise UserError(f"{folder}/model.safetensors: missing, extra or of another shape: {', '.join(wrong)}")
    head.load_state_dict(tensors)
    head.to(target.device)
    for parameter in head.parameters():  # weights alone: RoPE's frequencies lose whole turns in half precision
        parameter.data = parameter.data.to(target.dtype)
