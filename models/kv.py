"""Keys and values of B sequences of unequal length, with rollback and tree gather.

One buffer per layer, allocated once and written in place, so that a decoding step copies only the new entries. Every layer
keeps all entries, sliding-window layers too: rolling back across a window needs what the window has dropped, so windows are
applied by the mask alone. Knows `transformers`' cache interface; knows nothing of models, tokens or acceptance.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class KVLayer(CacheLayerMixin):
    """The entries of one layer. The owning `KVCache` says where the next ones go."""

    is_croppable = True
    is_sliding = False

    def __init__(self, owner: "KVCache") -> None:
        super().__init__()
        self._owner = owner

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate zeroed buffers: an entry that a mask hides must still be finite, since 0 · NaN is NaN."""
        batch, capacity = self._owner.lengths.shape[0], self._owner.capacity
        self.keys = key_states.new_zeros(batch, key_states.shape[1], capacity, key_states.shape[3])
        self.values = value_states.new_zeros(batch, value_states.shape[1], capacity, value_states.shape[3])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write `[B, heads, n, dim]` behind each row's committed entries; return all up to the longest row."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        owner, count = self._owner, key_states.shape[2]
        end = owner.end(count)
        if owner.even:
            start = end - count
            self.keys[:, :, start:end] = key_states
            self.values[:, :, start:end] = value_states
        else:
            rows = torch.arange(key_states.shape[0], device=key_states.device)[:, None]
            slots = owner.slots(count)
            self.keys[rows, :, slots] = key_states.transpose(1, 2)
            self.values[rows, :, slots] = value_states.transpose(1, 2)
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._owner.end(query_length), 0

    def get_seq_length(self) -> int:
        return int(self._owner.longest)

    def get_max_length(self) -> int:
        return self._owner.capacity


class KVCache(Cache):
    """Entries of B rows; `lengths [B]` says how many of each row's are committed.

    A forward over n new tokens writes them behind the committed ones; `commit` then decides which of them stay. A tree that
    grows level by level is fed by several forwards: `hold` keeps a level's entries, uncommitted, in front of the next one's.
    Entries beyond that are leftovers that every mask must hide (`attention_mask` does).
    """

    def __init__(self, batch: int, capacity: int, layers: int, device: torch.device | str = "cpu") -> None:
        self.capacity = capacity
        self.set_lengths(torch.zeros(batch, dtype=torch.long, device=device))
        super().__init__(layers=[KVLayer(self) for _ in range(layers)])

    def set_lengths(self, lengths: Tensor) -> None:
        """Roll every row back to its first `lengths[b]` entries."""
        counts = lengths.tolist()
        self.lengths = lengths
        self.longest = max(counts)
        self.even = min(counts) == self.longest  # all rows alike: entries are written by a slice
        self.held = lengths.new_zeros(lengths.shape[0], 0)

    def hold(self, positions: Tensor) -> None:
        """Keep the entries written last for the next forward, uncommitted. positions [B, n]: where they stand in the text."""
        self.held = torch.cat([self.held, positions.expand(self.lengths.shape[0], -1)], dim=1)

    def slots(self, count: int) -> Tensor:
        """Buffer positions `[B, count]` of the next `count` entries of each row."""
        return self.lengths[:, None] + self.held.shape[1] + torch.arange(count, device=self.lengths.device)

    def end(self, count: int) -> int:
        """One past the last buffer position that `count` further entries touch. Raises IndexError when the buffer is full."""
        end = self.longest + self.held.shape[1] + count
        if end > self.capacity:
            raise IndexError(f"the cache holds {self.capacity} entries, {end} are needed")
        return end

    def select(self, rows: Tensor) -> None:
        """Go on with these rows only."""
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys, layer.values = layer.keys[rows], layer.values[rows]
        self.set_lengths(self.lengths[rows])

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep, of each row's uncommitted entries, those at these rising offsets (a chain's are 0, 1, 2 …), moved up to be
        contiguous."""
        counts = [len(path) for path in paths]
        if any(path and path[-1] != len(path) - 1 for path in paths):
            width, device = max(counts), self.lengths.device
            rows = torch.arange(len(paths), device=device)[:, None]
            # Columns past a row's count are padding: they are moved onto themselves.
            offsets = torch.tensor([[*path, *range(len(path), width)] for path in paths], device=device)
            source = self.lengths[:, None] + offsets
            target = self.lengths[:, None] + torch.arange(width, device=device)
            for layer in self.layers:
                layer.keys[rows, :, target] = layer.keys[rows, :, source]
                layer.values[rows, :, target] = layer.values[rows, :, source]
        self.set_lengths(self.lengths + torch.tensor(counts, device=self.lengths.device))


def attention_mask(
    cache: KVCache, visible: Tensor, positions: Tensor, dtype: torch.dtype, window: int | None = None
) -> Tensor:
    """Additive mask [B, 1, n, end] for n new entries: 0 where attention is allowed, the dtype's minimum elsewhere.

    Each new entry sees all committed entries of its row and those uncommitted ones (held, then new) that `visible` [B or 1, n,
    held + n] names: for a chain its predecessors, for a tree its ancestors, and itself. With a `window` it sees only keys less than
    `window` positions back, where positions [B, n] are those of the new entries and committed entries stand at 0, 1, 2 … .
    A hidden entry gets the minimum and not −∞, so that a row which sees nothing yields finite numbers.
    """
    batch, count = positions.shape
    end, held = cache.end(count), cache.held.shape[1]
    if cache.even and window is None:  # all committed entries, and of the others what `visible` says
        mask = torch.zeros(batch, 1, count, end, dtype=dtype, device=positions.device)
        mask[..., cache.longest :].masked_fill_(~visible[:, None], torch.finfo(dtype).min)
        return mask
    uncommitted = torch.cat([cache.held, positions], dim=1)
    key_index = torch.arange(end, device=positions.device)
    allowed = (key_index < cache.lengths[:, None])[:, None, :].expand(batch, count, end).clone()
    key_positions = key_index.expand(batch, end).clone()
    if cache.even:
        allowed[:, :, cache.longest :] = visible
        key_positions[:, cache.longest :] = uncommitted
    else:
        slots = cache.lengths[:, None] + torch.arange(held + count, device=positions.device)
        shape = (batch, count, held + count)
        allowed.scatter_(2, slots[:, None, :].expand(shape), visible.expand(shape))
        key_positions.scatter_(1, slots, uncommitted)
    if window is not None:
        allowed &= positions[:, :, None] - key_positions[:, None, :] < window
    mask = torch.zeros(batch, 1, count, end, dtype=dtype, device=positions.device)
    return mask.masked_fill_(~allowed[:, None], torch.finfo(dtype).min)
