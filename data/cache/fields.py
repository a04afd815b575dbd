"""Which fields a cache has, how each is stored, and how many bytes that takes: the manifest's `fields`.

Knows settings and codecs. Does not know targets beyond their sizes, nor files.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.data.cache.codecs import DISTRIBUTION_CODECS, STATE_CODECS, id_type, tensor_name
from draftsmith.data.cache.manifest import CacheSettings
from draftsmith.errors import UserError
from draftsmith.models.target import choose_taps


def cache_fields(settings: CacheSettings, width: int, vocabulary: int, blocks: int) -> dict[str, dict[str, Any]]:
    """The manifest's `fields`: codec of each stored field and what decoding needs. Raises `UserError` if impossible."""
    codec = DISTRIBUTION_CODECS[settings.distribution]
    distribution: dict[str, Any] = {"codec": settings.distribution, "vocabulary": vocabulary}
    if codec.parts:
        if settings.distribution != "sampled" and settings.k > vocabulary:
            raise UserError(f"cache.k: {settings.k} tokens of a vocabulary of {vocabulary}; lower cache.k")
        if codec.most is not None and settings.k > codec.most:
            raise UserError(f"cache.k: {settings.k} draws of a token, at most {codec.most} are counted; lower cache.k")
        distribution["k"] = settings.k
    fields = {"distribution": distribution}
    states: dict[str, Any] = {"codec": settings.state_codec, "width": width}
    if (rotation := STATE_CODECS[settings.state_codec].rotation) is not None:
        states["rotation"] = rotation
    if settings.taps != "none":
        fields["taps"] = states | {"blocks": list(choose_taps(blocks, settings.taps))}
    if settings.last:
        fields["last"] = states
    return fields


def bytes_per_token(fields: dict[str, dict[str, Any]]) -> int:
    """Bytes on disk of one token with all its fields, where no earlier row has it."""
    total = row_bytes_per_token(fields)
    for field, about in fields.items():
        if field == "distribution":
            total += DISTRIBUTION_CODECS[about["codec"]].bytes_per_token(about["vocabulary"], about.get("k", 0))
        else:
            total += len(about.get("blocks", [0])) * STATE_CODECS[about["codec"]].bytes_per_state(about["width"])
    return total


def row_bytes_per_token(fields: dict[str, dict[str, Any]]) -> int:
    """Bytes on disk of what each row has of a token, shared or not: id and mask."""
    return id_type(fields["distribution"]["vocabulary"]).itemsize + 1


def kept_mass(fields: dict[str, dict[str, Any]], tensors: Mapping[str, Tensor], uses: Tensor) -> float:
    """Mean over the tokens of a shard's rows of the probability that the stored tokens cover; 1 where nothing is left out.

    uses: [N], in how many rows each stored token stands.
    """
    codec = DISTRIBUTION_CODECS[fields["distribution"]["codec"]]
    mass = codec.mass({part: tensors[tensor_name("distribution", part)] for part in codec.parts}).double()
    return float((mass * uses).sum() / uses.sum())


def row_uniforms(token_ids: np.ndarray) -> Tensor:
    """One number in [0, 1) for each token of a row, float64 [T], made from the tokens up to it alone: what is drawn with them
    depends neither on batches nor on who computes the row, and rows with a common prefix agree on it."""
    ids = np.ascontiguousarray(token_ids, dtype=np.uint64)
    prefixes = np.cumsum(_scrambled(_scrambled(np.arange(len(ids), dtype=np.uint64)) ^ ids), dtype=np.uint64)
    return torch.from_numpy((_scrambled(prefixes) >> np.uint64(11)) * 2.0**-53)


def _scrambled(numbers: np.ndarray) -> np.ndarray:
    """Whole numbers of 64 bits, mixed so that neighbours look independent (SplitMix64, Steele, Lea and Flood 2014)."""
    z = numbers + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
