"""EAGLE-3's training-time test: the head drafts from its own states while it is trained (arXiv 2503.01840, section 3.2).

All slots of a row roll out in parallel. At step k slot t reads the data's token x_{t+1+k} and its own state of step k − 1
(g_t at step 0) and predicts x_{t+2+k}. Knows the head's `step` and nothing of losses.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.models.eagle import EagleHead


class RolloutAttention:
    """An `Attend` for all slots at once: slot t sees the step-0 keys 0 … t and its own key of every later step.

    The softmax is taken over the union. Later steps contribute one key per slot, so their scores are dot products and not
    matrix products: memory grows with T · (T + K), not with T · K T.
    """

    def __init__(self) -> None:
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
        slots, scale = query.shape[2], query.shape[3] ** -0.5
        causal = torch.ones(slots, slots, dtype=torch.bool, device=query.device).tril()
        block = (query @ keys[0].mT * scale).masked_fill(~causal, float("-inf"))
        own = torch.stack([(query * k).sum(-1) * scale for k in keys[1:]], dim=-1)
        weights = torch.cat([block, own], dim=-1).softmax(-1)
        out = weights[..., :slots] @ values[0]
        for j, v in enumerate(values[1:]):
            out = out + weights[..., slots + j, None] * v
        return out


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
