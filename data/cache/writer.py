"""Shards that are complete or absent, entered in the manifest only when they are on disk.

Knows files, checksums and the life of a cache folder. Does not know the target or what the arrays mean.
"""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import xxhash
from safetensors.torch import save
from torch import Tensor

from draftsmith.data.cache.manifest import (
    NAME,
    Manifest,
    Shard,
    read_manifest,
    refuse_changes,
    with_shard,
    write_manifest,
)
from draftsmith.data.cache.ranks import Ranks
from draftsmith.errors import UserError
from draftsmith.files import publish

READ_AT_ONCE = 1 << 22


class CacheWriter:
    """A cache folder being written by one or several ranks. An existing one is resumed, or refused if `manifest` differs."""

    def __init__(self, folder: Path, manifest: Manifest, ranks: Ranks | None = None) -> None:
        """Clean up after a crash, keep the undamaged shards of an earlier run, record what is about to be written."""
        ranks = ranks or Ranks()
        self.folder = Path(folder)
        self.rebuilt: list[str] = []  # damaged shards of the earlier run, with the damage
        if (self.folder / NAME).is_file():  # every rank looks, so that every rank says what is wrong
            old = read_manifest(self.folder)
            refuse_changes(self.folder, old, manifest)
        else:
            old = None
        if ranks.index == 0:
            if old is not None:
                damage = {shard.index: found for shard in old.shards if (found := shard_damage(self.folder, shard))}
                self.rebuilt = list(damage.values())
                kept = tuple(shard for shard in old.shards if shard.index not in damage)
                manifest = manifest.model_copy(update={"shards": kept})
            with self._plain_errors(manifest):
                self.folder.mkdir(parents=True, exist_ok=True)
                for leftover in self.folder.glob(".*.tmp"):
                    leftover.unlink()
                write_manifest(self.folder, manifest)
        ranks.barrier()
        self.manifest = read_manifest(self.folder)  # where this rank begins; others will add shards of theirs

    @property
    def published(self) -> set[int]:
        """Indices of the shards that need not be written again."""
        return {shard.index for shard in self.manifest.shards}

    def add(self, index: int, tensors: dict[str, Tensor], kept_mass: float, dropped: tuple[int, ...] = ()) -> Shard:
        """Publish one shard, then its entry. Raises `UserError` when the disk is full; the cache stays resumable."""
        path = self.folder / shard_name(index)
        sums: list[str] = []
        with self._plain_errors(self.manifest):
            publish(path, lambda temporary: sums.append(write_shard(tensors, temporary)))
            shard = Shard(
                index=index,
                name=path.name,
                rows=len(tensors["offsets"]) - 1,
                tokens=len(tensors["token_ids"]),
                bytes=path.stat().st_size,
                kept_mass=kept_mass,
                dropped=dropped,
                xxh3=sums[0],
            )
            with _locked(self.folder):
                self.manifest = with_shard(read_manifest(self.folder), shard)
                write_manifest(self.folder, self.manifest)
        return shard

    @contextmanager
    def _plain_errors(self, manifest: Manifest) -> Iterator[None]:
        """A disk that is full or not ours to write is the user's matter, in one line."""
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                done = f"{len(manifest.shards)} shards are complete"
                raise UserError(
                    f"{self.folder}: the disk is full; {done}; free some space and run the same command"
                ) from error
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
                raise UserError(
                    f"{self.folder}: cannot be written ({error.strerror}); allow it, or give another run_root"
                ) from error
            raise


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Alone at the manifest among the processes that write this folder; a crash frees the lock."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def write_shard(tensors: dict[str, Tensor], path: Path) -> str:
    """Write a safetensors file and return the checksum of what was to be written, without reading it back."""
    content = save(tensors)
    path.write_bytes(content)
    return xxhash.xxh3_128_hexdigest(content)


def shard_name(index: int) -> str:
    """shard-00000.safetensors and so on, in the order of rows."""
    return f"shard-{index:05d}.safetensors"


def checksum(path: Path) -> str:
    """XXH3-128 of a file's bytes, as 32 hex digits."""
    hasher = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(READ_AT_ONCE):
            hasher.update(piece)
    return hasher.hexdigest()


def shard_damage(folder: Path, shard: Shard, every_byte: bool = True) -> str | None:
    """What is wrong with a shard, beginning with its name, or None. Without `every_byte` only its presence and size."""
    path = Path(folder) / shard.name
    if not path.is_file():
        return f"{shard.name}: deleted"
    if (size := path.stat().st_size) != shard.bytes:
        return f"{shard.name}: {size} bytes instead of {shard.bytes}"
    if every_byte and (found := checksum(path)) != shard.xxh3:
        return f"{shard.name}: checksum {found} instead of {shard.xxh3}"
    return None
