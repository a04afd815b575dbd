"""Rows of unequal length -> padded batches of similar length, and the slots that are trained in them.

Knows padding and the convention of supervision. Does not know where rows come from or what is computed on them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

POOL = 32  # batches whose rows are sorted together: similar lengths inside a batch, different batches every epoch
NO_MASS = -100.0  # a log-probability whose exponential is nothing, yet p·log p stays finite


class TopK(NamedTuple):
    """The target's k likeliest next tokens after each slot. ids: int64 [B, T, k]; log_probs: float32 [B, T, k], true
    log-probabilities under the whole vocabulary, so the mass of all other tokens is 1 − Σ exp(log_probs)."""

    ids: Tensor
    log_probs: Tensor


class Sampled(NamedTuple):
    """Tokens drawn from the target's distribution after each slot: an unbiased estimate of it. ids: int64 [B, T, n],
    −1 in unused places; log_probs: float32 [B, T, n], their true log-probabilities; weights: float32 [B, T, n], the
    share of the draws that fell on each, whose expectation is the probability and whose sum is 1 (padding: 0)."""

    ids: Tensor
    log_probs: Tensor
    weights: Tensor


class HasTokens(Protocol):
    """A row of either kind: from `Rows` or from a cache."""

    @property
    def token_ids(self) -> np.ndarray: ...

    @property
    def supervised(self) -> np.ndarray: ...


class HasStates(HasTokens, Protocol):
    """A row of a cache (T tokens, A taps, W width, k kept tokens)."""

    @property
    def taps(self) -> np.ndarray | None: ...

    @property
    def last(self) -> np.ndarray | None: ...

    @property
    def distribution(self) -> tuple[np.ndarray, ...] | None: ...


@dataclass(frozen=True)
class Batch:
    """Rows padded on the right to the longest (B rows, T slots, A taps, W width). Padding is never supervised.

    token_ids: int64 [B, T]; supervised: bool [B, T] (role: predicted token); lengths: int64 [B];
    taps: float32 [B, T, A, W] or None; last: float32 [B, T, W] or None; teacher: over [B, T], or None where it is to be
    recomputed from `last`; weights: float32 [B, T], what the prediction of token t counts (None: 1 each).
    """

    token_ids: Tensor
    supervised: Tensor
    lengths: Tensor
    taps: Tensor | None = None
    last: Tensor | None = None
    teacher: TopK | Sampled | None = None
    weights: Tensor | None = None

    def to(self, device: str | torch.device) -> "Batch":
        """The batch with all tensors on `device`."""

        def move(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device)

        return Batch(
            self.token_ids.to(device),
            self.supervised.to(device),
            self.lengths.to(device),
            move(self.taps),
            move(self.last),
            None if self.teacher is None else type(self.teacher)(*(tensor.to(device) for tensor in self.teacher)),
            move(self.weights),
        )


def supervised_slots(supervised: Tensor, lengths: Tensor, offset: int) -> Tensor:
    """bool [B, T]: slot t is trained iff token t + offset exists in its row and is supervised.

    supervised: bool [B, T] by the role of the predicted token; lengths: int64 [B]. A draft LM has offset 1 (slot t
    predicts x_{t+1}), EAGLE at rollout step k has offset 2 + k (slot t predicts x_{t+2+k}).
    """
    slots = supervised.shape[1]
    exists = torch.arange(slots, device=supervised.device) < lengths.to(supervised.device)[:, None]
    trained = torch.zeros_like(supervised, dtype=torch.bool)
    if offset < slots:
        trained[:, : slots - offset] = (supervised & exists)[:, offset:]
    return trained


def length_buckets(lengths: Sequence[int] | np.ndarray, batch_tokens: int, rng: np.random.Generator) -> list[list[int]]:
    """Batches of row indices, each row once: similar lengths together, and at most `batch_tokens` slots with padding.

    A row longer than `batch_tokens` is a batch of its own. The same `rng` state gives the same batches.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    order = rng.permutation(len(sizes))
    pools = np.cumsum(sizes[order]) // min(POOL * batch_tokens, 2**62) if len(sizes) else sizes
    batches: list[list[int]] = []
    for pool in np.unique(pools):
        members = order[pools == pool]
        batches += fill_batches(members[np.argsort(sizes[members], kind="stable")], sizes, batch_tokens)
    return [batches[index] for index in rng.permutation(len(batches))]


def fill_batches(order: np.ndarray, lengths: np.ndarray, batch_tokens: int) -> list[list[int]]:
    """Consecutive rows of `order` (indices into `lengths`) in batches of at most `batch_tokens` padded slots."""
    batches: list[list[int]] = []
    longest = 0
    for index in map(int, order):
        longest = max(longest, int(lengths[index]))
        if not batches or longest * (len(batches[-1]) + 1) > batch_tokens:
            batches.append([])
            longest = int(lengths[index])
        batches[-1].append(index)
    return batches


def collate_rows(rows: Sequence[HasTokens]) -> Batch:
    """Token ids and masks of some rows, padded; no states and no teacher."""
    ids = _padded([np.asarray(row.token_ids, dtype=np.int64) for row in rows])
    supervised = _padded([np.asarray(row.supervised, dtype=bool) for row in rows])
    return Batch(ids, supervised, torch.tensor([len(row.token_ids) for row in rows], dtype=torch.int64))


def collate(rows: Sequence[HasStates]) -> Batch:
    """A batch of cached rows, with the fields that they have. Padded teacher slots hold no mass, in finite numbers."""
    batch = collate_rows(rows)
    taps = [row.taps for row in rows if row.taps is not None]
    last = [row.last for row in rows if row.last is not None]
    teacher = [row.distribution for row in rows if row.distribution is not None]
    if teacher:
        ids = _padded([np.asarray(parts[0], dtype=np.int64) for parts in teacher])
        log_probs = _padded([np.asarray(parts[1], dtype=np.float32) for parts in teacher], fill=NO_MASS)
        if len(teacher[0]) == 3:
            weights = _padded([np.asarray(parts[2], dtype=np.float32) for parts in teacher])
            batch = replace(batch, teacher=Sampled(ids, log_probs, weights))
        else:
            batch = replace(batch, teacher=TopK(ids, log_probs))
    return replace(batch, taps=_padded(taps) if taps else None, last=_padded(last) if last else None)


def _padded(arrays: list[np.ndarray], fill: float = 0) -> Tensor:
    """Arrays [T_i, …] as one tensor [B, max T, …], filled on the right."""
    longest = max(len(array) for array in arrays)
    out = np.full((len(arrays), longest, *arrays[0].shape[1:]), fill, dtype=arrays[0].dtype)
    for index, array in enumerate(arrays):
        out[index, : len(array)] = array
    return torch.from_numpy(out)
