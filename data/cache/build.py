"""Rows through the target into a cache: which taps, which rows, which shards, in length-bucketed batches, resumable.

Knows the target, the rows and the writer. Does not know training, nor which draft will read the cache.
"""

import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.data.batches import collate_rows, fill_batches
from draftsmith.data.cache.codecs import DISTRIBUTION_CODECS, STATE_CODECS, Parts, id_type, tensor_name
from draftsmith.data.cache.fields import bytes_per_token, cache_fields, kept_mass, row_uniforms
from draftsmith.data.cache.manifest import CacheSettings, Manifest
from draftsmith.data.cache.reader import decode_row
from draftsmith.data.cache.verify import cache_info, self_check
from draftsmith.data.cache.writer import CacheWriter
from draftsmith.data.rows import Row, Rows
from draftsmith.data.tokenizer import tokenizer_digest
from draftsmith.errors import UserError
from draftsmith.models.target import Target
from draftsmith.progress import Ticker, ticker

LOGITS_AT_ONCE = 1 << 25  # numbers in one chunk of logits: 128 MB in float32, whatever the vocabulary
MB = 1 << 20
ROW_BYTES = 9  # offset and domain
SHARD_BYTES = 1024  # header of a safetensors file


def build_cache(
    target: Target, rows: Rows, folder: Path, settings: CacheSettings, train_tokens: int | None = None
) -> dict[str, Any]:
    """Cache the first rows, up to `train_tokens` tokens (None: all), and return `cache_info` with what this call did.

    An interrupted cache is resumed after its last shard, and damaged shards are rebuilt. Raises `UserError` when the
    rows do not fit the target, when the folder holds another cache, or when the disk is too small; `RuntimeError` when
    a shard does not reproduce what the target computes.
    """
    taken = _taken(rows.lengths, train_tokens)
    lengths = rows.lengths[:taken]
    fields = cache_fields(settings, target.width, target.vocabulary, target.blocks)
    _check_rows(target, rows, lengths)
    manifest = Manifest(
        target=target.fingerprint(),
        dtype=str(target.dtype).removeprefix("torch."),
        fields=fields,
        data={"digest": rows.digest, "tokenizer": rows.tokenizer, "settings": rows.settings},
        domains=rows.domains,
        shard_mb=settings.shard_mb,
        rows=taken,
        tokens=int(lengths.sum()),
    )
    plan = shard_plan(lengths, int(settings.shard_mb * MB), bytes_per_token(fields))
    writer = CacheWriter(folder, manifest)
    todo = [index for index in range(len(plan)) if index not in writer.published]
    tokens = sum(int(lengths[slice(*plan[index])].sum()) for index in todo)
    _check_space(Path(folder), tokens * bytes_per_token(fields) + taken * ROW_BYTES)
    started = time.monotonic()
    with ticker("cache", tokens, "tokens") as progress:
        for index in todo:
            shard = _Shard(target, fields, [rows[row] for row in range(*plan[index])], rows.domains)
            tensors, kept_mass = shard.compute(settings.batch_tokens, progress)
            writer.add(index, tensors, kept_mass)
    seconds = time.monotonic() - started
    done = {"written_shards": len(todo), "rebuilt": writer.rebuilt, "seconds": seconds}
    return cache_info(Path(folder)) | done | {"tokens_per_second": tokens / max(seconds, 1e-9)}


def cache_bytes(settings: CacheSettings, *, tokens: int, rows: int, width: int, vocabulary: int, blocks: int) -> int:
    """The size on disk that a cache of `tokens` tokens in `rows` rows will have, within 5 %."""
    stored = tokens * bytes_per_token(cache_fields(settings, width, vocabulary, blocks)) + rows * ROW_BYTES
    return stored + (1 + int(stored / (settings.shard_mb * MB))) * SHARD_BYTES


def shard_plan(lengths: np.ndarray, shard_bytes: int, token_bytes: int) -> list[tuple[int, int]]:
    """[first, end) row of each shard: rows in order until `shard_bytes` are full.

    It is known before anything is computed, so that any shard can be made again alone.
    """
    plan: list[tuple[int, int]] = []
    room = 0
    for row, length in enumerate(map(int, lengths)):
        size = length * token_bytes
        if not plan or size > room:
            plan.append((row, row))
            room = shard_bytes
        plan[-1] = (plan[-1][0], row + 1)
        room -= size
    return plan


class _Shard:
    """The tensors of one shard, filled batch by batch: rows run through the target by length, yet stand in order."""

    def __init__(self, target: Target, fields: dict[str, dict[str, Any]], rows: list[Row], domains: list[str]) -> None:
        self.target, self.fields, self.rows = target, fields, rows
        self.lengths = np.asarray([len(row.token_ids) for row in rows])
        self.offsets = np.cumsum([0, *self.lengths], dtype=np.int64)
        self.tensors: dict[str, Tensor] = {
            "token_ids": torch.from_numpy(np.concatenate([row.token_ids for row in rows])).to(
                id_type(target.vocabulary)
            ),
            "supervised": torch.from_numpy(np.concatenate([row.supervised for row in rows])),
            "offsets": torch.from_numpy(self.offsets),
            "domain_of": torch.tensor([domains.index(row.domain) for row in rows], dtype=torch.uint8),
        }
        self.taps = tuple(fields["taps"]["blocks"]) if "taps" in fields else ()

    @torch.inference_mode()
    def compute(self, batch_tokens: int, progress: Ticker) -> tuple[dict[str, Tensor], float]:
        """All tensors, and the mean mass that the kept tokens cover. The longest row is checked against a live pass."""
        for batch in fill_batches(np.argsort(self.lengths, kind="stable"), self.lengths, batch_tokens):
            ids = collate_rows([self.rows[index] for index in batch]).token_ids.to(self.target.device)
            output = self.target.forward(ids, taps=self.taps, want_logits=False)
            for place, index in enumerate(batch):
                length = int(self.lengths[index])
                self._store(
                    index, None if output.taps is None else output.taps[place, :length], output.last[place, :length]
                )
            progress.advance(int(self.lengths[batch].sum()))
        self._check_longest()
        return self.tensors, kept_mass(self.fields, self.tensors)

    def _store(self, index: int, taps: Tensor | None, last: Tensor) -> None:
        """Encode one row: taps [T, A, W], last [T, W]."""
        for field, states in (("taps", taps), ("last", last)):
            if states is not None and not bool(torch.isfinite(states).all()):
                raise UserError(
                    f"the target's {field} are not finite in document {self.rows[index].document};"
                    " load it with dtype float32, or repair its weights"
                )
        for field, states in (("taps", taps), ("last", last[:, None])):
            if states is not None and (about := self.fields.get(field)):
                self._put(index, field, STATE_CODECS[about["codec"]].encode(states, about.get("rotation")), 0)
        about = self.fields["distribution"]
        if (codec := DISTRIBUTION_CODECS[about["codec"]]).parts:
            uniforms = row_uniforms(self.rows[index].token_ids).to(last.device)
            step = max(1, LOGITS_AT_ONCE // self.target.vocabulary)
            for first in range(0, len(last), step):
                logits = self.target.head(last[first : first + step])
                self._put(
                    index, "distribution", codec.encode(logits, about["k"], uniforms[first : first + step]), first
                )

    def _put(self, index: int, field: str, parts: Parts, first: int) -> None:
        """Copy parts, whose entries begin at token `first` of the row, to their place in the shard."""
        start = int(self.offsets[index]) + first
        for part, values in parts.items():
            name = tensor_name(field, part)
            if name not in self.tensors:
                self.tensors[name] = torch.empty((int(self.offsets[-1]), *values.shape[1:]), dtype=values.dtype)
            self.tensors[name][start : start + len(values)] = values.cpu()

    def _check_longest(self) -> None:
        index = int(self.lengths.argmax())
        start, end = int(self.offsets[index]), int(self.offsets[index + 1])
        row = decode_row(self.fields, lambda name: self.tensors[name][start:end], self.rows[index].domain)
        if found := self_check(self.target, self.fields, row):
            raise RuntimeError(f"self-check failed for document {self.rows[index].document}: {'; '.join(found)}")


def _taken(lengths: np.ndarray, train_tokens: int | None) -> int:
    """How many of the first rows fit into `train_tokens`; at least one."""
    if train_tokens is None:
        return len(lengths)
    return max(1, int(np.searchsorted(np.cumsum(lengths), train_tokens, side="right")))


def _check_rows(target: Target, rows: Rows, lengths: np.ndarray) -> None:
    if rows.tokenizer != tokenizer_digest(target.tokenizer):
        raise UserError(
            f"{rows.folder}: prepared with another tokenizer than the target's; run `draftsmith prepare` again"
        )
    if (longest := int(lengths.max())) > target.context:
        raise UserError(
            f"data.max_length: a row has {longest} tokens, the target's context is {target.context}; lower the field"
        )


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise UserError(
            f"{folder}: the cache needs {needed / 1e9:.2f} GB more, {free / 1e9:.2f} GB are free;"
            " free some space, or lower cache.k or the number of tokens"
        )
