"""What a cache says about itself: schema, target, conventions, fields, data, and one entry per published shard.

Knows the manifest file. Does not know what is inside a shard, nor how it was computed.
"""

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from draftsmith.errors import UserError
from draftsmith.files import publish_json
from draftsmith.settings import Settings, flat

SCHEMA = 1
NAME = "manifest.json"
# docs/conventions.md, as data: a reader refuses a cache that was made under others.
CONVENTIONS = {
    "last": "after the target's final norm: head(last) are the logits",
    "taps": "outputs of blocks counted from 0, before any final norm",
    "distribution": "entry t is p(x[t+1] | x[0..t])",
    "supervised": "entry t is the role of token t as a predicted token",
}


class CacheSettings(Settings):
    """What of the target is kept. `batch_tokens` changes only the speed of the forward passes, never the content."""

    taps: Literal["auto", "none"] | tuple[int, ...] = "auto"  # block outputs, from 0; "none" serves draft LMs only
    state_codec: Literal["bf16", "fp32"] = "bf16"
    k: int = Field(64, ge=1)  # likeliest tokens kept of each distribution
    last: bool = False  # only EAGLE-1 and Medusa take the last state as input
    batch_tokens: int = Field(4096, ge=1)
    shard_mb: float = Field(64, gt=0)  # a crash loses at most one shard


class Shard(Settings):
    """One published file. `index` is its place in the order of rows."""

    index: int
    name: str
    rows: int
    tokens: int
    bytes: int
    kept_mass: float  # mean over tokens of the probability that the kept tokens cover; 1 without a distribution
    xxh3: str


class Manifest(Settings):
    """Everything but the shards is fixed when the cache is begun; `shards` grows, sorted by index."""

    schema_version: int = SCHEMA
    target: str  # fingerprint
    dtype: str  # in which the target computed
    conventions: dict[str, str] = Field(default_factory=lambda: dict(CONVENTIONS))
    fields: dict[str, dict[str, Any]]  # field -> codec and what decoding needs
    data: dict[str, Any]  # digest of the rows, their tokenizer and settings, number taken
    domains: list[str]
    shard_mb: float
    rows: int  # of the complete cache
    tokens: int
    shards: tuple[Shard, ...] = ()

    @property
    def missing_rows(self) -> int:
        return self.rows - sum(shard.rows for shard in self.shards)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a cache. Raises `UserError` when there is none, or when it does not fit this version."""
    path = Path(folder) / NAME
    if not path.is_file():
        raise UserError(f"{path}: no cache here; run `draftsmith cache` first")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        version = raw.get("schema_version") if isinstance(raw, dict) else None
        if version != SCHEMA:
            raise UserError(f"{path}: schema_version {version}, this version reads {SCHEMA}; make the cache again")
        manifest = Manifest.model_validate(raw)
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise UserError(
            f"{path}: field {where}: {error.errors()[0]['msg']}; delete the folder and make the cache again"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error}); delete the folder and make the cache again") from error
    for key, value in CONVENTIONS.items():
        if manifest.conventions.get(key) != value:
            found = manifest.conventions.get(key)
            raise UserError(
                f"{path}: conventions.{key} is {found!r}, this version reads {value!r}; make the cache again"
            )
    return manifest


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Publish the manifest atomically."""
    publish_json(Path(folder) / NAME, manifest.model_dump(mode="json"))


def with_shard(manifest: Manifest, shard: Shard) -> Manifest:
    """The manifest with one more shard; an earlier entry of the same index is replaced."""
    others = [other for other in manifest.shards if other.index != shard.index]
    return manifest.model_copy(update={"shards": tuple(sorted([*others, shard], key=lambda entry: entry.index))})


def refuse_changes(folder: Path, old: Manifest, new: Manifest) -> None:
    """Raise `UserError` naming the first setting in which a cache and what would be written into it differ."""
    before, after = (flat(manifest.model_dump(mode="json", exclude={"shards"})) for manifest in (old, new))
    # The digest says that the content differs, the settings say why: the digest and the totals are compared last.
    for key in sorted(before | after, key=lambda key: (key in ("data.digest", "rows", "tokens"), key)):
        if before.get(key) != after.get(key):
            raise UserError(
                f"{folder}: the cache was begun with {key} = {before.get(key)!r}, now it is {after.get(key)!r};"
                " restore the setting, or delete the folder to make the cache again"
            )
