"""Rows through the target into a cache: which taps, which rows, which shards, in length-bucketed batches, resumable.

Knows the target, the rows and the writer. Does not know training, nor which draft will read the cache.
"""

import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.data.batches import collate_rows, fill_batches
from draftsmith.data.cache.codecs import DISTRIBUTION_CODECS, STATE_CODECS, Parts, id_type, tensor_name
from draftsmith.data.cache.fields import bytes_per_token, cache_fields, kept_mass, row_bytes_per_token, row_uniforms
from draftsmith.data.cache.manifest import NAME, CacheSettings, Manifest, read_manifest
from draftsmith.data.cache.ranks import launched_ranks
from draftsmith.data.cache.reader import OF_ROWS, decode_row, own_pieces, row_of
from draftsmith.data.cache.verify import cache_info, self_check
from draftsmith.data.cache.writer import CacheWriter
from draftsmith.data.rows import Row, Rows, shared_prefix
from draftsmith.data.tokenizer import tokenizer_digest
from draftsmith.errors import UserError
from draftsmith.models.target import Target
from draftsmith.progress import Ticker, ticker

LOGITS_AT_ONCE = 1 << 25  # numbers in one chunk of logits: 128 MB in float32, whatever the vocabulary
FEW_ROWS = 8  # so many rows may fail before their share of all rows is judged
MB = 1 << 20
ROW_BYTES = 13  # offset, domain and length of the shared prefix
SHARD_BYTES = 1024  # header of a safetensors file
FULL = 4  # times `shard_mb`: at most so large grows a shard to keep rows that share a prefix together


def build_cache(
    target: Target, rows: Rows, folder: Path, settings: CacheSettings, train_tokens: int | None = None
) -> dict[str, Any]:
    """Cache the first rows, up to `train_tokens` tokens (None: all), and return `cache_info` with what this call did.

    A shard is written by a thread while the next is computed, so two are in memory. Several ranks share the shards out;
    what each shard holds does not depend on who computes it. An interrupted cache is resumed, damaged shards are rebuilt,
    rows with states that are not finite are dropped and counted. Raises `UserError` when the rows do not fit the target,
    when most of them fail, when the folder holds another cache, or when the disk is too small; `RuntimeError` when a
    shard does not reproduce what the target computes.
    """
    taken = _taken(rows.lengths, train_tokens)
    lengths = rows.lengths[:taken]
    fields = cache_fields(settings, target.width, target.vocabulary, target.blocks)
    check_rows(target, rows, lengths)
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
    shared = rows.shared[:taken]
    plan = shard_plan(lengths, shared, int(settings.shard_mb * MB), bytes_per_token(fields))
    ranks = launched_ranks(on_cpu=target.device.type == "cpu")
    writer = CacheWriter(folder, manifest, ranks)
    todo = [index for index in range(len(plan)) if index not in writer.published]
    _check_space(Path(folder), _stored_bytes(fields, [plan[index] for index in todo], lengths, shared))
    ranks.barrier()  # each has measured the free space before any of them takes some
    own = todo[ranks.index :: ranks.count]
    tokens = sum(int(lengths[slice(*plan[index])].sum()) for index in own)
    tally = Tally(writer.manifest.dropped_rows, writer.manifest.rows - writer.manifest.missing_rows)
    started = time.monotonic()
    pending: Future[Any] | None = None
    with ticker("cache", tokens, "tokens") as progress, ThreadPoolExecutor(1, "cache-writer") as thread:
        for index in own:
            shard = _Shard(target, fields, [rows[row] for row in range(*plan[index])], rows.domains)
            tensors, kept_mass = shard.compute(settings.batch_tokens, progress, tally)
            tally.check(at_end=index == own[-1])
            if pending is not None:
                pending.result()  # at most one shard waits for the disk; what went wrong there is raised here
            dropped = tuple(plan[index][0] + place for place in sorted(shard.bad))
            pending = thread.submit(writer.add, index, tensors, kept_mass, dropped)
        if pending is not None:
            pending.result()
    seconds = time.monotonic() - started
    ranks.barrier()
    done = {"written_shards": len(own), "rebuilt": writer.rebuilt, "seconds": seconds}
    return cache_info(Path(folder)) | done | {"tokens_per_second": tokens / max(seconds, 1e-9)}


def remove_foreign(folder: Path, fingerprint: str, rows: Rows) -> list[str]:
    """Remove a cache of a target or of rows that are gone: it is of no use. Returns which of the two it was made for.

    A cache of other cache settings stays: `build_cache` refuses to mix them.
    """
    if not (folder / NAME).is_file():
        return []
    old = read_manifest(folder)
    changed = [] if old.target == fingerprint else ["target"]
    if (old.data.get("digest"), old.data.get("settings")) != (rows.digest, rows.settings):
        changed.append("rows")
    if changed:
        shutil.rmtree(folder)
    return changed


def measured_rate(target: Target, settings: CacheSettings, length: int) -> float:
    """Tokens per second of one full batch of random rows of `length` tokens: forward, head and codecs, without the disk."""
    rng = np.random.default_rng(0)
    count = max(1, settings.batch_tokens // length)
    ids = rng.integers(0, target.vocabulary, (count, length), dtype=np.int32)
    rows = [Row(row, np.ones(length, dtype=bool), "random", "random") for row in ids]
    fields = cache_fields(settings, target.width, target.vocabulary, target.blocks)
    shard = _Shard(target, fields, rows, ["random"])
    started = time.monotonic()
    shard.compute(settings.batch_tokens, Ticker("measure", ids.size, "tokens", None), Tally())
    return ids.size / (time.monotonic() - started)


@dataclass
class Tally:
    """How many of the rows that were tried have failed: states that are not finite."""

    bad: int = 0
    tried: int = 0
    first: str = ""  # what failed first

    def check(self, at_end: bool = False) -> None:
        """Raise `UserError` when most rows fail: that is the target's fault, not the rows'."""
        if 2 * self.bad > self.tried and (at_end or self.bad > FEW_ROWS):
            raise UserError(
                f"{self.bad} of {self.tried} rows failed: the target's {self.first};"
                " load it with dtype float32, or repair its weights"
            )


def cache_bytes(
    settings: CacheSettings, *, lengths: np.ndarray, shared: np.ndarray, width: int, vocabulary: int, blocks: int
) -> int:
    """The size on disk, within 5 %, that a cache of rows of those lengths and shared prefixes (int [rows]) will have."""
    fields = cache_fields(settings, width, vocabulary, blocks)
    plan = shard_plan(lengths, shared, int(settings.shard_mb * MB), bytes_per_token(fields))
    return _stored_bytes(fields, plan, lengths, shared)


def _stored_bytes(
    fields: dict[str, dict[str, Any]], plan: list[tuple[int, int]], lengths: np.ndarray, shared: np.ndarray
) -> int:
    tokens = sum(int(lengths[first:end].sum()) for first, end in plan)
    again = sum(int(shared[first + 1 : end].sum()) for first, end in plan)  # the first row of a shard is whole
    rows = sum(end - first for first, end in plan)
    stored = (tokens - again) * bytes_per_token(fields) + again * row_bytes_per_token(fields)
    return stored + rows * ROW_BYTES + len(plan) * SHARD_BYTES


def shard_plan(lengths: np.ndarray, shared: np.ndarray, shard_bytes: int, token_bytes: int) -> list[tuple[int, int]]:
    """[first, end) row of each shard: rows in order until `shard_bytes` are full, or `FULL` times as many where a row shares
    a prefix with the one before it.

    It is known before anything is computed, so that any shard can be made again alone.
    """
    plan: list[tuple[int, int]] = []
    held = 0
    for row, (length, before) in enumerate(zip(lengths.tolist(), shared.tolist(), strict=True)):
        size = (length - before) * token_bytes
        if not plan or held + size > shard_bytes * (FULL if before else 1):
            plan.append((row, row))
            held, size = 0, length * token_bytes
        plan[-1] = (plan[-1][0], row + 1)
        held += size
    return plan


class _Shard:
    """The tensors of one shard, filled batch by batch: rows run through the target by length, yet stand in order."""

    def __init__(self, target: Target, fields: dict[str, dict[str, Any]], rows: list[Row], domains: list[str]) -> None:
        self.target, self.fields, self.domains = target, fields, domains
        self.taps = tuple(fields["taps"]["blocks"]) if "taps" in fields else ()
        self.bad: set[int] = set()  # rows that are dropped in the end
        self._lay_out(rows)

    def _lay_out(self, rows: list[Row]) -> None:
        """Where everything stands: ids and masks row after row, of all else what a row does not share with the one before."""
        self.rows = rows
        self.lengths = np.asarray([len(row.token_ids) for row in rows], dtype=np.int64)
        self.shared = np.asarray([shared_prefix(*pair) for pair in zip([None, *rows], rows, strict=False)], np.int32)
        own = self.lengths - self.shared
        self.starts, self.size = np.cumsum(own) - own, int(own.sum())
        ids, supervised = (
            [np.zeros(0, dtype), *(getattr(row, name) for row in rows)]
            for name, dtype in zip(OF_ROWS, (np.int32, np.bool_), strict=True)
        )
        self.tensors: dict[str, Tensor] = {
            "token_ids": torch.from_numpy(np.concatenate(ids)).to(id_type(self.target.vocabulary)),
            "supervised": torch.from_numpy(np.concatenate(supervised)),
            "offsets": torch.from_numpy(np.cumsum([0, *self.lengths], dtype=np.int64)),
            "domain_of": torch.tensor(
                [self.domains.index(row.domain) for row in rows], dtype=id_type(len(self.domains))
            ),
            "shared": torch.from_numpy(self.shared),
        }

    @torch.inference_mode()
    def compute(self, batch_tokens: int, progress: Ticker, tally: Tally) -> tuple[dict[str, Tensor], float]:
        """All tensors, and the mean mass that the kept tokens cover. The longest row is checked against a live pass."""
        for batch in fill_batches(np.argsort(self.lengths, kind="stable"), self.lengths, batch_tokens):
            taps, last = self._forward(batch)
            self._note_failures(batch, taps, last, tally)
            self._store(batch, taps, last)
            tally.check()
            progress.advance(int(self.lengths[batch].sum()))
        if self.bad:
            self._drop(batch_tokens)
        if not self.rows:
            return self.tensors, 1.0
        self._check_longest()
        uses = torch.zeros(self.size)
        for index in range(len(self.rows)):
            for piece in self._pieces(index):
                uses[piece] += 1
        return self.tensors, kept_mass(self.fields, self.tensors, uses)

    def _forward(self, batch: list[int]) -> tuple[Tensor | None, Tensor]:
        ids = collate_rows([self.rows[index] for index in batch]).token_ids.to(self.target.device)
        output = self.target.forward(ids, taps=self.taps, want_logits=False)
        return output.taps, output.last

    def _note_failures(self, batch: list[int], taps: Tensor | None, last: Tensor, tally: Tally) -> None:
        for field, states in (("taps", taps), ("last", last)):
            if states is None or bool(torch.isfinite(states.sum(dtype=torch.float32))):
                continue  # one number tells that all are finite, at a fraction of the cost
            for place, index in enumerate(batch):
                if index not in self.bad and not bool(torch.isfinite(states[place, : self.lengths[index]]).all()):
                    self.bad.add(index)
                    tally.bad += 1
                    tally.first = tally.first or f"{field} are not finite in document {self.rows[index].document}"
            states.nan_to_num_(0.0, 0.0, 0.0)  # a codec need not know what to do with them
        tally.tried += len(batch)

    def _store(self, batch: list[int], taps: Tensor | None, last: Tensor) -> None:
        """Encode what the rows of one batch do not share, of taps [B, T, A, W] and last [B, T, W]; distributions over all its
        tokens at once."""
        own = [slice(int(self.shared[index]), int(self.lengths[index])) for index in batch]
        for field, states in (("taps", taps), ("last", last[:, :, None])):
            if states is not None and (about := self.fields.get(field)):
                codec = STATE_CODECS[about["codec"]]
                for place, index in enumerate(batch):
                    self._put(index, field, codec.encode(states[place, own[place]], about.get("rotation")))
        about = self.fields["distribution"]
        if (teacher := DISTRIBUTION_CODECS[about["codec"]]).parts:
            tokens = torch.cat([last[place, span] for place, span in enumerate(own)])
            drawn_with = [row_uniforms(self.rows[index].token_ids)[own[place]] for place, index in enumerate(batch)]
            uniforms = torch.cat(drawn_with).to(last.device)
            step = max(1, LOGITS_AT_ONCE // self.target.vocabulary)
            pieces = zip(tokens.split(step), uniforms.split(step), strict=True)
            encoded = [teacher.encode(self.target.head(piece), about["k"], drawn) for piece, drawn in pieces]
            sizes = [span.stop - span.start for span in own]
            parts = {part: torch.cat([piece[part] for piece in encoded]).split(sizes) for part in encoded[0]}
            for place, index in enumerate(batch):
                self._put(index, "distribution", {part: values[place] for part, values in parts.items()})

    def _drop(self, batch_tokens: int) -> None:
        """Leave out the rows that failed. What one of them stored for a later row, which may have failed too, is made again."""
        kept = [index for index in range(len(self.rows)) if index not in self.bad]
        before, starts, shared = self.tensors, self.starts[kept], self.shared[kept]
        self._lay_out([self.rows[index] for index in kept])
        own = self.lengths - self.shared
        for name in before.keys() - self.tensors.keys():
            self.tensors[name] = before[name].new_empty((self.size, *before[name].shape[1:]))
            for place in np.flatnonzero(self.shared >= shared):
                old, new = int(starts[place] + self.shared[place] - shared[place]), int(self.starts[place])
                self.tensors[name][new : new + own[place]] = before[name][old : old + own[place]]
        for batch in fill_batches(np.flatnonzero(self.shared < shared), self.lengths, batch_tokens):
            self._store(batch, *self._forward(batch))

    def _pieces(self, index: int) -> list[slice]:
        return own_pieces(self.lengths, self.shared, self.starts, index)

    def _read(self, index: int) -> Callable[[str], Tensor]:
        start, end = map(int, self.tensors["offsets"][index : index + 2])
        return row_of(self.tensors.__getitem__, slice(start, end), self._pieces(index))

    def _put(self, index: int, field: str, parts: Parts) -> None:
        """Copy a row's parts to their place in the shard."""
        start = int(self.starts[index])
        for part, values in parts.items():
            name = tensor_name(field, part)
            if name not in self.tensors:
                self.tensors[name] = torch.empty((self.size, *values.shape[1:]), dtype=values.dtype)
            self.tensors[name][start : start + len(values)] = values

    def _check_longest(self) -> None:
        index = int(self.lengths.argmax())
        row = decode_row(self.fields, self._read(index), self.rows[index].domain)
        if found := self_check(self.target, self.fields, row):
            raise RuntimeError(f"self-check failed for document {self.rows[index].document}: {'; '.join(found)}")


def _taken(lengths: np.ndarray, train_tokens: int | None) -> int:
    """How many of the first rows fit into `train_tokens`; at least one."""
    if train_tokens is None:
        return len(lengths)
    return max(1, int(np.searchsorted(np.cumsum(lengths), train_tokens, side="right")))


def check_rows(target: Target, rows: Rows, lengths: np.ndarray) -> None:
    """Raise `UserError` when prepared rows do not fit the target: another tokenizer, or longer than its context."""
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
