"""Random access to a cache, memory-mapped: any row, decoded to float32, without reading the others.

Knows shards and codecs. Does not know the target: it only compares fingerprints.

Ids and mask stand in a shard for every row. All else depends on the tokens up to its own alone, so a row of which the first
tokens are those of the row before (one conversation, fanned out) stores it for the rest only: the reader puts rows together.
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftsmith.data.batches import Batch, collate
from draftsmith.data.cache.codecs import DISTRIBUTION_CODECS, STATE_CODECS, tensor_name
from draftsmith.data.cache.manifest import Manifest, read_manifest
from draftsmith.data.cache.writer import shard_damage
from draftsmith.errors import UserError
from draftsmith.files import digest

OPEN_SHARDS = 32  # a mapped file counts as memory of this process as far as it has been read
OF_ROWS = ("token_ids", "supervised")  # whole for each row, in places that `offsets` tell
ALWAYS = (*OF_ROWS, "offsets", "domain_of", "shared")


class CachedRow(NamedTuple):
    """One row of T tokens (A taps, width W, k kept tokens or draws); a field that the cache lacks is None.

    token_ids: int32 [T]; supervised: bool [T]; taps: float32 [T, A, W]; last: float32 [T, W];
    distribution: ids int64 [T, k] and true log-probabilities float32 [T, k], entry t being p(x_{t+1} | x_≤t); of a sampled
    one also weights float32 [T, k] (see `draftsmith.data.batches.Sampled`); None where it is to be computed from `last`.
    """

    token_ids: np.ndarray
    supervised: np.ndarray
    taps: np.ndarray | None
    last: np.ndarray | None
    distribution: tuple[np.ndarray, ...] | None
    domain: str


class CacheReader(Sequence[CachedRow]):
    """The rows of a cache in the order of the prepared rows. Refuses an incomplete, damaged or foreign cache."""

    def __init__(self, folder: Path, target_fingerprint: str | None = None) -> None:
        """Check manifest, presence, size and tensor names of all shards (`verify`: every byte). Raises `UserError`."""
        self.folder = Path(folder)
        self.manifest = manifest = read_manifest(self.folder)
        if target_fingerprint is not None and target_fingerprint != manifest.target:
            raise UserError(
                f"{self.folder}: made from target {manifest.target}, not {target_fingerprint}; make the cache again"
            )
        if not manifest.shards:
            raise UserError(f"{self.folder}: the cache is empty; run `draftsmith cache`")
        if manifest.missing_rows:
            raise UserError(
                f"{self.folder}: {manifest.missing_rows} of {manifest.rows} rows are missing; resume `draftsmith cache`"
            )
        _check_codecs(self.folder, manifest)
        self._handles: OrderedDict[int, Any] = OrderedDict()
        self._stamps = [self._stamp(number) for number in range(len(manifest.shards))]
        lengths: list[np.ndarray] = []
        domain_of: list[np.ndarray] = []
        shared: list[np.ndarray] = []
        for number in range(len(manifest.shards)):
            self._check(number)
            lengths.append(np.diff(self._handle(number).get_tensor("offsets").numpy()))
            domain_of.append(self._handle(number).get_tensor("domain_of").numpy().copy())
            shared.append(self._handle(number).get_tensor("shared").numpy().copy())
        # Some thirty bytes a row are all that grows with their number; the rest stays in the files.
        self._first = np.cumsum([0, *map(len, lengths)])  # row with which each shard begins
        self._domain_of = np.concatenate(domain_of)
        self.lengths: np.ndarray = np.concatenate(lengths)  # int64 [rows]
        self._starts = np.concatenate(
            [np.cumsum(whole) - whole for whole in lengths]
        )  # a row's first token in its shard
        self._shared = np.concatenate(shared)  # int32 [rows]: tokens that the row before has
        own = [whole - before for whole, before in zip(lengths, shared, strict=True)]
        self._own_starts = np.concatenate(
            [np.cumsum(part) - part for part in own]
        )  # where what only this row has begins
        self.domains: list[str] = manifest.domains
        if not len(self.lengths):
            raise UserError(f"{self.folder}: the cache is empty: all its rows were dropped; make it again")

    @property
    def taps(self) -> tuple[int, ...]:
        """The blocks whose outputs are stored, counted from 0."""
        return tuple(self.manifest.fields.get("taps", {}).get("blocks", ()))

    @property
    def identity(self) -> str:
        """Changes with the target, the rows and the content of the cache: training continues on the same one only."""
        return digest(self.manifest.model_dump(mode="json"))

    def __len__(self) -> int:
        return int(self._first[-1])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return decode_row(self.manifest.fields, self._read(range(len(self))[index]), self.domain(index))

    def tokens(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and mask of a row, without its states."""
        read = self._read(index)
        return read("token_ids").to(torch.int32).numpy(), read("supervised").numpy()

    def _read(self, index: int) -> Callable[[str], Tensor]:
        """What returns a row's part of a stored tensor: a view of the mapped file unless the row shares a prefix."""
        handle = self._handle(int(np.searchsorted(self._first, index, side="right")) - 1)
        whole = slice(start := int(self._starts[index]), start + int(self.lengths[index]))
        return row_of(handle.get_slice, whole, own_pieces(self.lengths, self._shared, self._own_starts, index))

    def batch(self, indices: Sequence[int]) -> Batch:
        """Some rows, padded: what a trainer takes (`draftsmith.train.loop.Source`)."""
        return collate([self[index] for index in indices])

    def __iter__(self) -> Iterator[CachedRow]:
        return (self[index] for index in range(len(self)))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_handles": OrderedDict()}  # open files do not travel to worker processes

    def domain(self, index: int) -> str:
        """The domain of a row, without reading it."""
        return self.domains[self._domain_of[index]]

    def verify(self) -> list[str]:
        """Read every byte and return what is damaged, one line a shard, beginning with its name."""
        return [found for shard in self.manifest.shards if (found := shard_damage(self.folder, shard))]

    def _stamp(self, number: int) -> tuple[int, int] | None:
        """Size and time of change of a shard's file; None where it is gone, which a map that is open outlives."""
        try:
            about = os.stat(self.folder / self.manifest.shards[number].name)
        except FileNotFoundError:
            return None
        return about.st_size, about.st_mtime_ns

    def _handle(self, number: int) -> Any:
        """The open shard. To read behind the end of a mapped file kills the process, so every read looks at the file first."""
        if self._stamp(number) not in (None, self._stamps[number]):
            path = self.folder / self.manifest.shards[number].name
            raise UserError(f"{path}: changed since it was opened; run `draftsmith cache-repair CONFIG`")
        if number not in self._handles:
            path = self.folder / self.manifest.shards[number].name
            try:
                self._handles[number] = safe_open(path, "pt")
            except SafetensorError as error:
                raise UserError(f"{path}: damaged ({error}); run `draftsmith cache-repair CONFIG`") from error
            if len(self._handles) > OPEN_SHARDS:
                self._handles.popitem(last=False)
        self._handles.move_to_end(number)
        return self._handles[number]

    def _check(self, number: int) -> None:
        shard = self.manifest.shards[number]
        if damage := shard_damage(self.folder, shard, every_byte=False):
            raise UserError(f"{self.folder}: {damage}; run `draftsmith cache-repair CONFIG`")
        missing = sorted(set(shard_tensors(self.manifest)) - set(self._handle(number).keys()))
        if missing:
            raise UserError(
                f"{self.folder}: {shard.name} lacks field {missing[0]}; run `draftsmith cache-repair CONFIG`"
            )


def own_pieces(lengths: np.ndarray, shared: np.ndarray, starts: np.ndarray, index: int) -> list[slice]:
    """Where among the stored tokens those of a row stand, in order: its own behind those it shares with the rows before.

    lengths, shared, starts: int [rows], of each row its tokens, how many of them the row before has, and the place of the others.
    """
    pieces: list[slice] = []
    end = int(lengths[index])  # the tokens before it are still to be found
    for row in range(index, -1, -1):
        first, start = int(shared[row]), int(starts[row])
        if first < end:
            pieces.insert(0, slice(start, start + end - first))
            end = first
        if end == 0:
            break
    return pieces


def row_of(stored: Callable[[str], Any], whole: slice, pieces: list[slice]) -> Callable[[str], Tensor]:
    """What returns a row's part of the tensors that `stored` returns by name; no copy where it is in one piece."""

    def read(name: str) -> Tensor:
        tensor = stored(name)
        if name in OF_ROWS:
            return tensor[whole]
        found = [tensor[piece] for piece in pieces]
        return found[0] if len(found) == 1 else torch.cat(found)

    return read


def decode_row(fields: dict[str, dict[str, Any]], read: Callable[[str], Tensor], domain: str) -> CachedRow:
    """The row whose stored tensors `read` returns by name, with every field decoded as the manifest's `fields` say."""
    states: dict[str, np.ndarray | None] = {"taps": None, "last": None}
    for field in states:
        if about := fields.get(field):
            codec = STATE_CODECS[about["codec"]]
            parts = {part: read(tensor_name(field, part)) for part in codec.parts}
            decoded = codec.decode(parts, about["width"], about.get("rotation"))
            states[field] = (decoded[:, 0] if field == "last" else decoded).numpy()
    distribution = None
    if about := fields.get("distribution"):
        teacher = DISTRIBUTION_CODECS[about["codec"]]
        arrays = teacher.decode({part: read(tensor_name("distribution", part)) for part in teacher.parts})
        distribution = None if arrays is None else tuple(array.numpy() for array in arrays)
    token_ids, supervised = read("token_ids").to(torch.int32).numpy(), read("supervised").numpy()
    return CachedRow(token_ids, supervised, states["taps"], states["last"], distribution, domain)


def shard_tensors(manifest: Manifest) -> list[str]:
    """The names of all tensors that each shard of a cache holds."""
    names = list(ALWAYS)
    for field, about in manifest.fields.items():
        codec: Any = (DISTRIBUTION_CODECS if field == "distribution" else STATE_CODECS)[about["codec"]]
        names += [tensor_name(field, part) for part in codec.parts]
    return names


def _check_codecs(folder: Path, manifest: Manifest) -> None:
    for field, about in manifest.fields.items():
        known: dict[str, Any] = DISTRIBUTION_CODECS if field == "distribution" else STATE_CODECS
        if field not in ("taps", "last", "distribution") or about.get("codec") not in known:
            raise UserError(
                f"{folder}: field {field} has unknown codec {about.get('codec')!r}; this version reads {sorted(known)}"
            )
