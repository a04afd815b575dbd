"""How states and distributions become arrays in a shard, and back. One entry in a registry for each codec.

Knows numbers per token. Does not know files, rows or targets. A codec turns values into named parts, each with one
entry per token, so that a row is a slice of each; "" is the main part and is stored under the field's own name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Parts = dict[str, Tensor]


@dataclass(frozen=True)
class StateCodec:
    """States float32 [N, A, W] <-> parts with N entries each.

    bytes_per_state(width): size of one stored state. tolerance: largest relative error of a state (norm of the
    difference / norm) that encoding may cause. kl: largest mean KL, in nats per token, between live logits and those
    rebuilt from the last state.
    """

    encode: Callable[[Tensor], Parts]
    decode: Callable[[Mapping[str, Tensor]], Tensor]
    parts: tuple[str, ...]
    bytes_per_state: Callable[[int], int]
    tolerance: float
    kl: float


def _plain(dtype: torch.dtype, tolerance: float, kl: float) -> StateCodec:
    return StateCodec(
        encode=lambda states: {"": states.to(dtype)},
        decode=lambda parts: parts[""].to(torch.float32),
        parts=("",),
        bytes_per_state=lambda width: width * dtype.itemsize,
        tolerance=tolerance,
        kl=kl,
    )


# A target that computes in bf16 differs between two batches by about 2⁻⁸ itself; in fp32 only summation order is left.
STATE_CODECS: dict[str, StateCodec] = {
    "fp32": _plain(torch.float32, tolerance=1e-4, kl=1e-6),
    "bf16": _plain(torch.bfloat16, tolerance=2**-7, kl=1e-3),
}


@dataclass(frozen=True)
class DistributionCodec:
    """Logits [N, V] -> parts with N entries each -> (ids int64 [N, k], true log-probabilities float32 [N, k])."""

    encode: Callable[[Tensor, int], Parts]
    decode: Callable[[Mapping[str, Tensor]], tuple[Tensor, Tensor]]
    parts: tuple[str, ...]
    bytes_per_token: Callable[[int, int], int]


def id_type(vocabulary: int) -> torch.dtype:
    """The smallest unsigned type that holds every id of a vocabulary."""
    return torch.uint8 if vocabulary <= 1 << 8 else torch.uint16 if vocabulary <= 1 << 16 else torch.uint32


def _encode_topk(logits: Tensor, k: int) -> Parts:
    """The k likeliest tokens and their log_softmax over the whole vocabulary: the rest of the mass is 1 − Σ exp."""
    values, ids = torch.log_softmax(logits.to(torch.float32), dim=-1).topk(k, dim=-1)
    return {"ids": ids.to(id_type(logits.shape[-1])), "log_probs": values}


DISTRIBUTION_CODECS: dict[str, DistributionCodec] = {
    "topk": DistributionCodec(
        encode=_encode_topk,
        decode=lambda parts: (parts["ids"].to(torch.int64), parts["log_probs"]),
        parts=("ids", "log_probs"),
        bytes_per_token=lambda vocabulary, k: k * (id_type(vocabulary).itemsize + 4),
    )
}


def tensor_name(field: str, part: str) -> str:
    """The name under which a part of a field stands in a shard: `taps`, `distribution.ids`."""
    return f"{field}.{part}" if part else field


def kept_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p ‖ q) in nats, per token [N], over the tokens kept and the rest as one more outcome.

    log_p, log_q: [N, k], log-probabilities of the same k tokens under the two distributions.
    """
    p, q = log_p.double().exp(), log_q.double().exp()
    rest_p, rest_q = ((1 - x.sum(-1)).clamp_min(0) for x in (p, q))
    inside = (p * (log_p.double() - log_q.double())).sum(-1)
    # Where everything is kept the rest is rounding noise: it must not be divided by.
    rest = torch.where(rest_p > 1e-6, rest_p * (rest_p.clamp_min(1e-12) / rest_q.clamp_min(1e-12)).log(), 0.0)
    return inside + rest
