"""Shards that are complete or absent, entered in the manifest only when they are on disk.

Knows files, checksums and the life of a cache folder. Does not know the target or what the arrays mean.
"""

import errno
from pathlib import Path

import xxhash
from safetensors import SafetensorError
from safetensors.torch import save_file
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
from draftsmith.errors import UserError
from draftsmith.files import publish

READ_AT_ONCE = 1 << 22


class CacheWriter:
    """A cache folder being written. An existing one is resumed, or refused if `manifest` says something else."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        """Clean up after a crash, keep the undamaged shards of an earlier run, record what is about to be written."""
        self.folder = Path(folder)
        self.manifest = manifest
        self.rebuilt: list[str] = []  # damaged shards of the earlier run, with the damage
        if (self.folder / NAME).is_file():
            old = read_manifest(self.folder)
            refuse_changes(self.folder, old, manifest)
            damage = {shard.index: found for shard in old.shards if (found := shard_damage(self.folder, shard))}
            self.rebuilt = list(damage.values())
            kept = tuple(shard for shard in old.shards if shard.index not in damage)
            self.manifest = manifest.model_copy(update={"shards": kept})
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob(".*.tmp"):
            leftover.unlink()
        write_manifest(self.folder, self.manifest)

    @property
    def published(self) -> set[int]:
        """Indices of the shards that need not be written again."""
        return {shard.index for shard in self.manifest.shards}

    def add(self, index: int, tensors: dict[str, Tensor], kept_mass: float) -> Shard:
        """Publish one shard, then its entry. Raises `UserError` when the disk is full; the cache stays resumable."""
        path = self.folder / shard_name(index)
        try:
            publish(path, lambda temporary: save_file(tensors, temporary))
            shard = Shard(
                index=index,
                name=path.name,
                rows=len(tensors["offsets"]) - 1,
                tokens=len(tensors["token_ids"]),
                bytes=path.stat().st_size,
                kept_mass=kept_mass,
                xxh3=checksum(path),
            )
            self.manifest = with_shard(self.manifest, shard)
            write_manifest(self.folder, self.manifest)
        except (OSError, SafetensorError) as error:
            full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
            if not full:
                raise
            done = f"{len(self.published)} shards are complete"
            raise UserError(
                f"{self.folder}: the disk is full; {done}; free some space and run the same command"
            ) from error
        return shard


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
