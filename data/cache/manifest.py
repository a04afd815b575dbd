"""What a cache says about itself: schema, target, conventions, fields, data, and one entry per published shard.

Knows the manifest file. Does not know what is inside a shard, nor how it was computed.
"""

import json
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from draftsmith.errors import UserError
from draftsmith.files import digest, publish_json
from draftsmith.settings import Settings, flat

SCHEMA = 2
NAME = "manifest.json"
# docs/conventions.md, as data: a reader refuses a cache that was made under others.
CONVENTIONS = {
    "last": "after the target's final norm: head(last) are the logits",
    "taps": "outputs of blocks counted from 0, before any final norm",
    "distribution": "entry t is p(x[t+1] | x[0..t])",
    "supervised": "entry t is the role of token t as a predicted token",
}


class ImportSettings(Settings):
    """A dump of another project, made from this target, in place of a forward pass."""

    format: Literal["speculators", "specforge"]
    path: str = Field(min_length=1)  # the folder of the dump
    layers: tuple[int, ...] | None = (
        None  # the dump's, as its project counts them (null: that project's own for this depth)
    )
    masks: str | None = None  # speculators: the data set with loss_mask (null: beside the states)

    @field_validator("path", "masks")
    @classmethod
    def _at_home(cls, path: str | None) -> str | None:
        return path if path is None else str(Path(path).expanduser())


class CacheSettings(Settings):
    """What of the target is kept. `batch_tokens` changes only the speed of the forward passes, never the content."""

    taps: Literal["auto", "none"] | tuple[int, ...] = "auto"  # block outputs, from 0; "none" serves draft LMs only
    state_codec: Literal["fp32", "bf16", "fp8", "int8", "int4"] = "bf16"
    # topk: the likeliest tokens and the mass of the rest; topk8: the same, log-probabilities in a byte; sampled: unbiased
    # draws; from_last: nothing, it is computed again from the last state, which is then stored: as exactly as state_codec is.
    distribution: Literal["topk", "topk8", "sampled", "from_last"] = "sampled"
    k: int = Field(64, ge=1)  # likeliest tokens kept of each distribution, or draws from it
    last: bool = False  # only EAGLE-1, Medusa and from_last take the last state as input
    batch_tokens: int = Field(4096, ge=1)
    shard_mb: float = Field(64, gt=0)  # a crash loses at most two shards: one computed, one written
    online: bool = False  # nothing on disk: the target computes every batch when a trainer asks for it
    imported: ImportSettings | None = None  # states of another project's dump (null: the target computes them)

    @model_validator(mode="before")
    @classmethod
    def _from_last_keeps_last(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("distribution") == "from_last":
            return {"last": True} | values
        return values

    @model_validator(mode="after")
    def _last_is_there(self) -> Self:
        if self.distribution == "from_last" and not self.last:
            raise ValueError("last: from_last computes the distribution from it; leave last out or make it true")
        if self.online and self.imported is not None:
            raise ValueError("online: an imported dump is on disk already; leave online or imported out")
        return self


class Shard(Settings):
    """One published file. `index` is its place in the order of rows."""

    index: int = Field(ge=0)
    name: str = Field(pattern=r"^shard-\d{5,}\.safetensors$")  # never a path: a manifest cannot point out of its folder
    rows: int = Field(ge=0)
    tokens: int = Field(ge=0)
    bytes: int = Field(ge=0)
    kept_mass: float  # mean over tokens of the probability that the kept tokens cover; 1 without a distribution
    dropped: tuple[int, ...] = ()  # prepared rows for which the target computed numbers that are not finite
    xxh3: str = Field(pattern="^[0-9a-f]{32}$")


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
        """Rows of shards that are not published yet; a dropped row is not missing."""
        return self.rows - self.dropped_rows - sum(shard.rows for shard in self.shards)

    @property
    def dropped_rows(self) -> int:
        return sum(len(shard.dropped) for shard in self.shards)


_ANEW = "delete {} and make the cache again"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a cache. Raises `UserError` when there is none, or when it does not fit this version."""
    path = Path(folder) / NAME
    if not path.is_file():
        raise UserError(f"{path}: no cache here; run `draftsmith cache` first")
    try:
        raw = json.loads(path.read_bytes())
        if isinstance(raw, dict) and "digest" in raw and raw.pop("digest") != digest(raw):
            raise UserError(f"{path}: does not have its own digest; run `draftsmith cache-repair CONFIG`")
        version = raw.get("schema_version") if isinstance(raw, dict) else None
        if version != SCHEMA:
            raise UserError(
                f"{path}: schema_version {version}, this version reads {SCHEMA}; {_ANEW.format(path.parent)}"
            )
        manifest = Manifest.model_validate(raw)
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise UserError(
            f"{path}: field {where}: {error.errors()[0]['msg']}; run `draftsmith cache-repair CONFIG`"
        ) from error
    except (ValueError, RecursionError) as error:  # of JSON or of its encoding: the file was cut short or overwritten
        raise UserError(f"{path}: not JSON ({error}); run `draftsmith cache-repair CONFIG`") from error
    for key, value in CONVENTIONS.items():
        if manifest.conventions.get(key) != value:
            found = manifest.conventions.get(key)
            raise UserError(
                f"{path}: conventions.{key} is {found!r}, this version reads {value!r}; {_ANEW.format(path.parent)}"
            )
    return manifest


def remove_unreadable(folder: Path) -> str | None:
    """Remove a manifest that cannot be read: without it no shard can be trusted. Returns what was wrong with it, or None."""
    path = Path(folder) / NAME
    if not path.is_file():
        return None
    try:
        read_manifest(folder)
    except UserError as error:
        path.unlink()
        return str(error).split(";")[0]
    return None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Publish the manifest atomically, with a digest: a flipped byte in a number would not show otherwise."""
    values = manifest.model_dump(mode="json")
    publish_json(Path(folder) / NAME, values | {"digest": digest(values)})


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
