"""Which fields a cache has, how each is stored, and how many bytes that takes: the manifest's `fields`.

Knows settings and codecs. Does not know targets beyond their sizes, nor files.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import xxhash
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
    """Bytes on disk of one token with all its fields."""
    total = id_type(fields["distribution"]["vocabulary"]).itemsize + 1  # id and mask
    for field, about in fields.items():
        if field == "distribution":
            total += DISTRIBUTION_CODECS[about["codec"]].bytes_per_token(about["vocabulary"], about.get("k", 0))
        else:
            total += len(about.get("blocks", [0])) * STATE_CODECS[about["codec"]].bytes_per_state(about["width"])
    return total


def kept_mass(fields: dict[str, dict[str, Any]], tensors: Mapping[str, Tensor]) -> float:
    """Mean over the tokens of a shard of the probability that the stored tokens cover; 1 where nothing is left out."""
    codec = DISTRIBUTION_CODECS[fields["distribution"]["codec"]]
    return float(codec.mass({part: tensors[tensor_name("distribution", part)] for part in codec.parts}).double().mean())


def row_uniforms(token_ids: np.ndarray) -> Tensor:
    """One number in [0, 1) for each token of a row, float64 [T], made from the row's content alone: what is drawn with them
    depends neither on batches nor on who computes the row."""
    key = xxhash.xxh3_64_intdigest(np.ascontiguousarray(token_ids, dtype="<i8").tobytes())
    return torch.from_numpy(np.random.Generator(np.random.Philox(key=key)).random(len(token_ids)))
