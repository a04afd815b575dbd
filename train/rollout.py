"""EAGLE-3's training-time test: the head drafts from its own states while it is trained (arXiv 2503.01840, section 3.2).

All slots of a row roll out in parallel. At step k slot t reads the data's token x_{t+1+k} and its own state of step k − 1
(g_t at step 0) and predicts x_{t+2+k}. Knows the head's `step` and nothing of losses.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from draftsmith.models.eagle import EagleHead

# Queries of a causal block at once: its scores [SLOTS, T] are made again on the way back, and nothing of size T · T is kept.
SLOTS = 256

# Causal attention of slot t over 0 … t: query, key, value [B, heads, T, d] -> out [B, heads, T, d], log Σ exp(scores) [B, heads, T]
Block = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class RolloutAttention:
    """An `Attend` for all slots at once: slot t sees the step-0 keys 0 … t and its own key of every later step.

    The softmax is over the union: the causal block over step 0 comes with its log-normaliser, and the own keys of later steps,
    whose scores are dot products, are merged into it exactly. So there is no score matrix of size T × K T, and memory grows with T.
    """

    def __init__(self, block: Block | None = None) -> None:
        """block: how the causal block is computed (default: by `flex_block` on a GPU, else by `causal_block`)."""
        self._block = block
        self._keys: dict[int, list[Tensor]] = {}
        self._values: dict[int, list[Tensor]] = {}

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        keys, values = self._keys.setdefault(layer, []), self._values.setdefault(layer, [])
        keys.append(key)
        values.append(value)
        if len(keys) == 1:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)
        block = self._block or (flex_block if query.is_cuda else causal_block)
        before, log_before = block(query, keys[0], values[0])
        own = torch.stack([(query * k).sum(-1) * query.shape[3] ** -0.5 for k in keys[1:]], dim=-1)
        log_total = torch.logaddexp(log_before, own.logsumexp(-1))
        out = (log_before - log_total).exp()[..., None] * before
        for share, v in zip((own - log_total[..., None]).exp().unbind(-1), values[1:], strict=True):
            out = out + share[..., None] * v
        return out


def causal_block(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """A `Block` on any device: `SLOTS` queries at a time, each piece recomputed on the way back."""
    slots = query.shape[2]
    if slots <= SLOTS:
        return _piece(query, key, value, 0)
    pieces = [
        checkpoint(
            _piece, query[:, :, i : i + SLOTS], key[:, :, : i + SLOTS], value[:, :, : i + SLOTS], i, use_reentrant=False
        )
        for i in range(0, slots, SLOTS)
    ]
    return torch.cat([out for out, _ in pieces], dim=2), torch.cat([log_sum for _, log_sum in pieces], dim=2)


def _piece(query: Tensor, key: Tensor, value: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Queries of slots first, first + 1 … over the keys from 0 to the last of them."""
    hidden = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).triu(first + 1)
    scores = (query @ key.mT * query.shape[3] ** -0.5).masked_fill(hidden, float("-inf"))
    log_sum = scores.logsumexp(-1)
    return (scores - log_sum[..., None]).exp() @ value, log_sum


def flex_block(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The same `Block` by FlexAttention, whose backward exists on GPUs alone; compiled there, with one mask a length."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    attention: Any = torch.compile(flex_attention) if query.is_cuda else flex_attention
    mask = _causal_mask(query.shape[2], str(query.device))
    out, beside = attention(query, key, value, block_mask=mask, return_aux=AuxRequest(lse=True))
    return out, beside.lse


@functools.lru_cache(maxsize=8)
def _causal_mask(slots: int, device: str) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda _b, _h, q, k: q >= k, None, None, slots, slots, device=device)


def shift(tokens: Tensor, by: int) -> Tensor:
    """tokens [B, T] moved left: entry t becomes tokens[t + by], zero where there is none."""
    return F.pad(tokens[:, by:], (0, min(by, tokens.shape[1])))


def rollout(head: EagleHead, token_ids: Tensor, features: Tensor, steps: int, detach: bool = False) -> Iterator[Tensor]:
    """The head's states [B, T, H] of steps 0 … steps − 1.

    token_ids [B, T]; features: the target's taps [B, T, A, W], for EAGLE-1 its last states [B, T, W]. Gradients flow through all
    steps, or with `detach` from each step into its own computation alone (HASS, arXiv 2408.15766). Slots near a row's end read
    padding: their predictions lie beyond the row and are not supervised (`supervised_slots` with offset 2 + k).
    """
    state, attend = head.fuse(features), RolloutAttention()
    slots = torch.arange(token_ids.shape[1], device=token_ids.device)[None]
    first = 0 if head.config.inputs == "unshifted" else 1  # the token that slot 0 joins at step 0
    for k in range(steps):
        if detach and k:
            state = state.detach()
        state = head.step(shift(token_ids, first + k), state, slots + k, attend)
        yield state
