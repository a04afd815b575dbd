"""Checkpoints of a training run: folders that are complete or absent, in safetensors and JSON, the newest two kept.

Knows parameters, optimiser state and random numbers by name; knows nothing of losses or data. What the draft is made of besides
(its configuration, its vocabulary) stands in the draft that is published, and frozen weights of the target in neither.
"""

import json
import os
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from draftsmith.errors import UserError
from draftsmith.files import digest, publish_json
from draftsmith.train.ranks import share, whole

SCHEMA, KEPT = 2, 2
STATE, TENSORS = "state.json", ("weights", "optimizer", "random")
DRAFT = "kept.json"
SOURCE = "source"  # the tensors of a source of rows that has some

Tensors = dict[str, dict[str, Tensor]]  # file → name → tensor


class Checkpoints:
    """`<folder>/step-000120/`: `weights`, `optimizer`, `random`, for some `source.safetensors`, and `state.json` with digests.
    Beside them `kept.json`: digests of the draft's files when it was last kept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(self, step: int, tensors: Tensors, state: dict[str, Any]) -> None:
        """Write under a temporary name, flush all of it to disk, rename, then remove older ones. Raises OSError or
        SafetensorError where the disk refuses, with every earlier checkpoint as it was."""
        self.folder.mkdir(parents=True, exist_ok=True)
        partial, place = self.folder / ".partial", self._place(step)
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir()
            for name, values in tensors.items():
                save_file(values, partial / f"{name}.safetensors")
                _flush(partial / f"{name}.safetensors")
            digests = {name: _digest(partial / f"{name}.safetensors") for name in tensors}
            state = {"schema": SCHEMA, "step": step, "digests": digests, **state}
            publish_json(partial / STATE, state | {"digest": digest(state)})
            shutil.rmtree(place, ignore_errors=True)  # of the same step: only one that was found damaged
            partial.rename(place)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        _flush(self.folder)
        for old in self._steps()[:-KEPT]:
            shutil.rmtree(old)

    def newest(self, note: Callable[[str], None]) -> Path | None:
        """The newest checkpoint that is whole, None where there is none. Damaged ones are removed and `note` hears of each."""
        for place in reversed(self._steps()):
            try:
                self.read(place)
            except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
                note(f"{place} is damaged and removed ({str(error).splitlines()[0]})")
                shutil.rmtree(place)
            else:
                return place
        return None

    def read(self, place: Path) -> tuple[dict[str, Any], Tensors]:
        """State and tensors of one checkpoint. Raises where a file is missing or is not what was written, UserError where another
        version wrote it."""
        state = json.loads((place / STATE).read_text(encoding="utf-8"))
        if not isinstance(state, dict) or state.pop("digest") != digest(state):
            raise ValueError(f"{STATE} does not have its own digest")
        if state["schema"] != SCHEMA:
            raise UserError(
                f"{place}: a checkpoint of schema {state['schema']}, and this version of Draftsmith writes {SCHEMA}; "
                "go on with the version that began the run, or delete the folder to begin again"
            )
        if place != self._place(state["step"]):
            raise ValueError(f"{STATE} is of step {state['step']}")
        names = [*TENSORS, *({SOURCE} & set(state["digests"]))]
        for name in names:
            if _digest(place / f"{name}.safetensors") != state["digests"][name]:
                raise ValueError(f"{name}.safetensors does not have the digest in {STATE}")
        return state, {name: load_file(place / f"{name}.safetensors") for name in names}

    def note_draft(self) -> None:
        """Remember the files of the draft beside this folder, which has just been kept."""
        publish_json(self.folder / DRAFT, self._draft())

    def draft_is_whole(self) -> bool:
        """Whether they are still what they were then."""
        try:
            return bool(json.loads((self.folder / DRAFT).read_text(encoding="utf-8")) == self._draft())
        except (OSError, ValueError):
            return False

    def _draft(self) -> dict[str, str]:
        files = {path.relative_to(self.folder.parent): path for path in self.folder.parent.rglob("*") if path.is_file()}
        others = (self.folder.name, "training.jsonl")
        return {
            name.as_posix(): _digest(path)
            for name, path in sorted(files.items())
            if name.parts[0] not in others and not name.name.startswith(".")
        }

    def clear(self) -> None:
        """Remove all: the training is done."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _steps(self) -> list[Path]:
        return sorted(place for place in self.folder.glob("step-*") if place.is_dir() and not place.is_symlink())

    def _place(self, step: int) -> Path:
        return self.folder / f"step-{step:09d}"


def _digest(path: Path) -> str:
    hasher = xxhash.xxh3_128()
    with path.open("rb") as stream:
        while block := stream.read(1 << 22):
            hasher.update(block)
    return hasher.hexdigest()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that training changes, by name."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """Sixteen hex digits over names, shapes and bytes."""
    hasher = xxhash.xxh3_64()
    for name, tensor in tensors.items():
        hasher.update(f"{name} {tuple(tensor.shape)}".encode())
        hasher.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def capture(module: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """Masters, optimiser state and this rank's generators as whole tensors on the CPU. A collective where they are sharded."""
    weights, states = {}, {}
    for name, parameter in trained(module).items():
        weights[name] = kept(parameter)
        for key, value in optimizer.state.get(parameter, {}).items():
            states[f"{name}/{key}"] = kept(value)
    return dict(zip(TENSORS, (weights, states, torch_generators()), strict=True))


def torch_generators() -> dict[str, Tensor]:
    """The states of torch's generators in this process, by device."""
    states = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"cuda{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def of_rank(states: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Generators by the names that they have in a checkpoint: those of the main rank are plain, others say whose they are."""
    return {f"{name}@{rank}" if rank else name: state for name, state in states.items()}


def restore(module: nn.Module, optimizer: torch.optim.Optimizer, tensors: Tensors, rank: int = 0) -> None:
    """Put back what `capture` took, at whatever number of ranks. Generators of a rank that the checkpoint does not know stay as
    they are. Raises UserError where names or shapes differ."""
    parameters, weights = trained(module), tensors["weights"]
    expected = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if expected != found:
        wrong = sorted(key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key))
        raise UserError(f"checkpoint: {wrong[0]} is missing, extra or of another shape; delete the checkpoints")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(share(weights[name].to(parameter.device, parameter.dtype), parameter))
    for full, value in tensors["optimizer"].items():
        name, _, key = full.rpartition("/")
        parameter = parameters[name]
        value = value.to(parameter.device)
        optimizer.state[parameter][key] = share(value, parameter) if value.shape == parameter.shape else value
    randoms, of = tensors["random"], f"@{rank}" if rank else ""
    if f"torch{of}" in randoms:
        torch.set_rng_state(randoms[f"torch{of}"])
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            if f"cuda{index}{of}" in randoms:
                torch.cuda.set_rng_state(randoms[f"cuda{index}{of}"], index)


def kept(tensor: Tensor) -> Tensor:
    """A whole copy on the CPU, as a checkpoint takes it. A collective where the tensor is sharded."""
    return whole(tensor.detach()).cpu().contiguous().clone()


def generators() -> dict[str, Any]:
    """The states of Python's and NumPy's own generators, as JSON; torch's are tensors and in `capture`."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, cached],
    }


def set_generators(state: dict[str, Any]) -> None:
    """Put back what `generators` took."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), *rest))
