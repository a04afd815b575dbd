"""Hidden-state dumps of `speculators` and `SpecForge` -> the target cache, their conventions converted at this border.

Knows both layouts on disk (docs/importing.md has them side by side). Does not know shards and codecs: what a dump holds is
handed to `build_cache` in the place of a forward pass. Nothing is unpickled: tensors alone are read.
"""

import gzip
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.data.cache.build import build_cache
from draftsmith.data.cache.manifest import CacheSettings, ImportSettings
from draftsmith.data.corpus import DataSettings
from draftsmith.data.rows import Row, Rows, write_rows
from draftsmith.data.tokenizer import tokenizer_digest
from draftsmith.errors import UserError, first_line
from draftsmith.models.target import Target, choose_taps

CHECKED_ROWS = 8
# Median over tokens of ‖dumped − live‖ / ‖live‖: another engine's kernels, and the rounding of half precision block after block.
ALLOWED_ERROR = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.02}


class Sample(NamedTuple):
    """One file: ids int64 [T]; taps [T, A, W]; last [T, W] after the final norm; supervised bool [T]: token t is of an answer."""

    ids: Tensor
    taps: Tensor
    last: Tensor
    supervised: Tensor


class _Output(NamedTuple):
    logits: Tensor | None
    last: Tensor
    taps: Tensor | None


class _Dump:
    """A dump in the place of its target: `forward` looks states up, all else is the target's."""

    def __init__(self, target: Target, files: dict[bytes, int], read: Callable[[int], Sample], taps: tuple[int, ...]):
        self._target, self._files, self._read, self._taps = target, files, read, taps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def forward(self, ids: Tensor, taps: tuple[int, ...] = (), want_logits: bool = True) -> _Output:
        """ids [1, T]: a row of the dump, alone and whole."""
        sample = self._read(self._files[_key(ids[0])])
        last = sample.last.to(self._target.device, self._target.dtype)[None]
        chosen = sample.taps[None, :, [self._taps.index(tap) for tap in taps]].float() if taps else None
        return _Output(self._target.head(last) if want_logits else None, last, chosen)


def import_states(target: Target, settings: CacheSettings, folder: Path) -> dict[str, Any]:
    """Write the dump that `settings.imported` names into the cache `folder`; return what `build_cache` returns.

    Distributions are recomputed by the target's head. `cache.taps` are the dump's layers in our numbering. Raises `UserError`
    naming the file that is damaged, lacks a field or has one too many, and the convention in which the dump is not the target's.
    """
    about = settings.imported
    assert about is not None  # the caller's branch
    taps = dump_taps(about, target.blocks)
    names, read = (_specforge if about.format == "specforge" else _speculators)(about, target, taps)
    rows = []
    files: dict[bytes, int] = {}
    content = xxhash.xxh3_128()
    for number, name in enumerate(names):
        sample = read(number)
        supervised = sample.supervised.numpy().copy()
        supervised[:1] = False  # nothing predicts the first token
        rows.append(Row(sample.ids.numpy().astype(np.int32), supervised, "imported", name))
        files[_key(sample.ids)] = number
        for tensor in sample:
            content.update(tensor.contiguous().view(torch.uint8).numpy().data)
    if not any(row.supervised.any() for row in rows):
        raise UserError(f"{about.path}: no token is supervised: every loss_mask is 0")
    for number in sorted({round(i * (len(rows) - 1) / CHECKED_ROWS) for i in range(CHECKED_ROWS + 1)}):
        if found := contradiction(target, taps, read(number)):
            raise UserError(f"{names[number]}: {found}")
    place = folder.parent / "imported-rows"
    write_rows(rows, place / "train", DataSettings(), tokenizer_digest(target.tokenizer))
    chosen = settings.model_copy(update={"taps": taps, "batch_tokens": 1})  # a row at a time, to know which it is
    imported = Rows.open(place, "train")
    # What the manifest says of the data: a dump that changes is another one, though its tokens stay.
    imported.settings = {"imported": {"format": about.format, "content": content.hexdigest()}}
    return build_cache(cast(Target, _Dump(target, files, read, taps)), imported, folder, chosen)


def dump_taps(about: ImportSettings, blocks: int) -> tuple[int, ...]:
    """The blocks, counted from 0, whose outputs a dump holds. speculators names a layer by its input: one more."""
    shift = 1 if about.format == "speculators" else 0
    layers = about.layers if about.layers is not None else tuple(tap + shift for tap in choose_taps(blocks))
    taps = tuple(layer - shift for layer in layers)
    if list(taps) != sorted(set(taps)) or not taps or taps[0] < 0 or taps[-1] >= blocks:
        raise UserError(
            f"cache.imported.layers: {list(layers)} must be rising layer numbers from {shift} to {blocks - 1 + shift}, "
            f"as {about.format} counts them"
        )
    return taps


@torch.inference_mode()
def contradiction(target: Target, taps: tuple[int, ...], sample: Sample) -> str:
    """What of a sample the target does not compute, with the convention that would explain it; "" if nothing."""
    blocks = tuple(range(target.blocks))
    live = target.forward(sample.ids.to(target.device)[None], taps=blocks, want_logits=False)
    assert live.taps is not None
    outputs = live.taps[0].float().cpu()
    # Half precision on either side blurs the comparison.
    allowed = max(ALLOWED_ERROR[sample.taps.dtype], ALLOWED_ERROR[target.dtype])
    for place, tap in enumerate(taps):
        errors = [_error(sample.taps[:, place], outputs[:, block]) for block in blocks]
        nearest = min(blocks, key=lambda block: errors[block])
        if not errors[tap] <= allowed or nearest != tap:
            why = (
                f"it is that of block {nearest}: mend layers"
                if errors[nearest] <= allowed
                else "nor of any other block"
            )
            return (
                f"tap {place} is not the output of block {tap} of this target (relative error {errors[tap]:.2g}), {why}"
            )
    error = _error(sample.last, live.last[0].float().cpu())
    if not error <= allowed:
        twice = _error(target.final_norm(sample.last.to(target.device, target.dtype)), live.last[0].float().cpu())
        before = _error(sample.last, target.final_norm(live.last)[0].float().cpu())
        why = (
            " (it lies before the final norm)"
            if twice <= allowed
            else " (it was normed twice)"
            if before <= allowed
            else ""
        )
        return f"its last state is not the target's after the final norm (relative error {error:.2g}){why}: mend format"
    return ""


def _error(ours: Tensor, live: Tensor) -> float:
    ours = ours.float().cpu()
    return float(((ours - live).norm(dim=-1) / live.norm(dim=-1).clamp_min(1e-12)).median())


def _key(ids: Tensor) -> bytes:
    return ids.cpu().to(torch.int32).numpy().tobytes()


def _specforge(
    about: ImportSettings, target: Target, taps: tuple[int, ...]
) -> tuple[list[str], Callable[[int], Sample]]:
    """`data_N.ckpt` or `.ckpt.gz`, a dict each: input_ids [T], loss_mask [T] (1: the token is of an answer), hidden_state
    [1, T, W] after the final norm, aux_hidden_state [1, T, A·W]."""
    paths = _numbered(Path(about.path), r"data_(\d+)\.ckpt(\.gz)?")
    count = len(taps)

    def read(number: int) -> Sample:
        path = paths[number]
        try:
            with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
                fields = torch.load(cast(BinaryIO, file), map_location="cpu", weights_only=True)
        except (
            OSError,
            EOFError,
            RuntimeError,
            ValueError,
            KeyError,
            UnpicklingError,
            zipfile.BadZipFile,
        ) as error:
            raise UserError(
                f"{path}: damaged, or no plain dict of tensors ({first_line(error)}); dump it again"
            ) from error
        ids = _field(path, fields, "input_ids", ("T",), target)
        length = len(ids)
        mask = _field(path, fields, "loss_mask", (length,), target)
        last = _field(path, fields, "hidden_state", (1, length, target.width), target)[0]
        aux = _field(path, fields, "aux_hidden_state", (1, length, count * target.width), target)[0]
        _no_more(path, fields, {"input_ids", "loss_mask", "hidden_state", "aux_hidden_state"})
        return Sample(ids, aux.unflatten(-1, (count, target.width)), last, _mask(path, mask))

    return [str(path) for path in paths], read


def _speculators(
    about: ImportSettings, target: Target, taps: tuple[int, ...]
) -> tuple[list[str], Callable[[int], Sample]]:
    """`hs_N.safetensors`: hidden_states [T, A + 1, W], the last slot before the final norm, and token_ids [T]. The mask
    (`loss_mask`, 1: the token is of an answer) is that of row N of the data set on disk, whose `input_ids` must be the same."""
    from datasets import load_from_disk

    given = Path(about.path)
    states = given / "hidden_states" if (given / "hidden_states").is_dir() else given
    paths = _numbered(states, r"hs_(\d+)\.safetensors")
    places = [Path(about.masks)] if about.masks is not None else [given, given.parent]
    found = [place for place in places if (place / "dataset_info.json").is_file()]
    if not found:
        raise UserError(
            f"cache.imported.masks: no data set with loss masks at {places[0]}; name the folder that holds it"
        )
    masks = load_from_disk(str(found[0]))
    for column in ("input_ids", "loss_mask"):
        if column not in masks.column_names:
            raise UserError(f"{found[0]}: the data set has no column {column}")
    numbers = [int(path.stem.removeprefix("hs_")) for path in paths]
    if missing := sorted(set(range(len(masks))) ^ set(numbers)):
        what = f"has no row for hs_{missing[0]}" if missing[0] in numbers else f"has a row {missing[0]} without states"
        raise UserError(f"{found[0]}: the data set {what}.safetensors ({len(missing)} such); dump it again")

    def read(number: int) -> Sample:
        path, row = paths[number], masks[numbers[number]]
        try:
            fields = load_file(path)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: damaged ({first_line(error)}); dump it again") from error
        ids = _field(path, fields, "token_ids", ("T",), target)
        stacked = _field(path, fields, "hidden_states", (len(ids), len(taps) + 1, target.width), target)
        _no_more(path, fields, {"token_ids", "hidden_states"})
        tokens, mask = (torch.as_tensor(row[name]) for name in ("input_ids", "loss_mask"))
        if not torch.equal(ids.long(), tokens.long()) or len(mask) != len(ids):
            raise UserError(f"{path}: its token_ids are not the input_ids of row {numbers[number]} of {found[0]}")
        with torch.inference_mode():
            last = target.final_norm(stacked[:, -1].to(target.device, target.dtype)).cpu()
        return Sample(ids, stacked[:, :-1], last, _mask(path, mask))

    return [str(path) for path in paths], read


def _numbered(folder: Path, pattern: str) -> list[Path]:
    """The files below `folder` of that name, by their number."""

    def matches() -> Iterator[tuple[int, Path]]:
        for path in folder.rglob("*"):
            if match := re.fullmatch(pattern, path.name):
                yield int(match[1]), path

    paths = [path for _, path in sorted(matches())]
    if not paths:
        raise UserError(f"cache.imported.path: no file named {pattern} in {folder}; name the folder of the dump")
    return paths


def _field(path: Path, fields: Any, name: str, shape: tuple[Any, ...], target: Target) -> Tensor:
    """A field of that shape, of whole numbers below the vocabulary if it is one-dimensional and of finite ones otherwise."""
    tensor = fields.get(name) if isinstance(fields, dict) else None
    if not isinstance(tensor, Tensor):
        raise UserError(f"{path}: field {name} is missing")
    wanted = (len(tensor) if tensor.ndim else 0, *shape[1:]) if shape[0] == "T" else shape
    if tuple(tensor.shape) != wanted or not tensor.numel():
        raise UserError(
            f"{path}: field {name} has shape {list(tensor.shape)}, not {['T'] if shape[0] == 'T' else list(shape)}"
        )
    if len(shape) == 1:
        if tensor.is_floating_point() or int(tensor.min()) < 0 or int(tensor.max()) >= target.vocabulary:
            raise UserError(f"{path}: field {name} holds numbers that are no ids of this target")
    elif tensor.dtype not in ALLOWED_ERROR:
        raise UserError(f"{path}: field {name} is of type {tensor.dtype}; dump it as bfloat16, float16 or float32")
    elif not bool(torch.isfinite(tensor).all()):
        raise UserError(f"{path}: field {name} is not finite; dump it again")
    return tensor


def _no_more(path: Path, fields: dict[str, Any], known: set[str]) -> None:
    if extra := sorted(set(fields) - known):
        raise UserError(f"{path}: unknown field {extra[0]}; this version reads {', '.join(sorted(known))}")


def _mask(path: Path, mask: Tensor) -> Tensor:
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise UserError(f"{path}: its loss_mask holds other numbers than 0 and 1")
    return mask.bool()
