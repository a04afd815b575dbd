"""Random access to a cache, memory-mapped: any row, decoded to float32, without reading the others.

Knows shards and codecs. Does not know the target: it only compares fingerprints.
"""

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
ALWAYS = ("token_ids", "supervised", "offsets", "domain_of")


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
        lengths: list[np.ndarray] = []
        domain_of: list[np.ndarray] = []
        for number in range(len(manifest.shards)):
            self._check(number)
            lengths.append(np.diff(self._handle(number).get_tensor("offsets").numpy()))
            domain_of.append(self._handle(number).get_tensor("domain_of").numpy().copy())
        # Sixteen bytes a row are all that grows with their number; the rest stays in the files.
        self._first = np.cumsum([0, *map(len, lengths)])  # row with which each shard begins
        self._domain_of = np.concatenate(domain_of)
        self.lengths: np.ndarray = np.concatenate(lengths)  # int64 [rows]
        self._starts = np.concatenate([np.cumsum(own) - own for own in lengths])  # first token of a row in its shard
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
        """What returns a row's part of a stored tensor: a view of the mapped file."""
        number = int(np.searchsorted(self._first, index, side="right")) - 1
        start = int(self._starts[index])
        end, handle = start + int(self.lengths[index]), self._handle(number)
        return lambda name: handle.get_slice(name)[start:end]

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

    def _handle(self, number: int) -> Any:
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
