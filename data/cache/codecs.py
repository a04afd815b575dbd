"""How states and distributions become arrays in a shard, and back. One entry in a registry for each codec.

Knows numbers per token. Does not know files, rows or targets. A codec turns values into named parts, each with one
entry per token, so that a row is a slice of each; "" is the main part and is stored under the field's own name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftsmith.data.batches import NO_MASS
from draftsmith.data.cache.rotation import rotate
from draftsmith.errors import UserError

Parts = dict[str, Tensor]
Stored = Mapping[str, Tensor]

SCALED = ("", "scale")
FP8_MAX = 448.0  # the largest number of e4m3
# The 16 levels that lose least of a normal distribution (Max 1960, table 1, symmetric): what a rotated state looks like.
# Measured on the demo's states: 9.6 % relative error; 16 even steps from least to largest 10.8 %, symmetric ones 12.5 %.
NORMAL_LEVELS = np.array([0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0690, 2.7326], dtype=np.float32)
LEVELS = np.concatenate([-NORMAL_LEVELS[::-1], NORMAL_LEVELS])
CELLS, CELL = 256, 1 / 40  # the nearest level is looked up by cells of a fortieth of the standard deviation
CENTRES = (np.arange(CELLS, dtype=np.float32) - CELLS / 2 + 0.5) * CELL
NEAREST = np.abs(CENTRES[:, None] - LEVELS).argmin(1).astype(np.uint8)
NEAREST_LEVEL = LEVELS[NEAREST]
# A byte as its two levels, low half first: one complex number, so that one look-up decodes two.
PAIRS = np.stack([LEVELS[np.arange(256) & 15], LEVELS[np.arange(256) >> 4]], -1).view(np.complex64)[:, 0]
FP8_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()


@dataclass(frozen=True)
class StateCodec:
    """States float32 [N, A, W] <-> parts with N entries each.

    encode(states, rotation), decode(parts, width, rotation): `rotation` is the seed in the manifest's field, None if the
    codec turns nothing. bytes_per_state(width): size of one stored state. tolerance: largest relative error of a state
    (norm of the difference / norm) that encoding may cause. kl: largest mean KL, in nats per token, between live logits
    and those rebuilt from the last state. `encode` raises `UserError` for states that are not finite.
    """

    encode: Callable[[Tensor, int | None], Parts]
    decode: Callable[[Stored, int, int | None], Tensor]
    parts: tuple[str, ...]
    bytes_per_state: Callable[[int], int]
    tolerance: float
    kl: float
    rotation: int | None = None

    def roundtrip(self, states: Tensor) -> Tensor:
        """What is left of states [N, A, W] after storing: float32, on the CPU."""
        parts = {name: part.cpu() for name, part in self.encode(states, self.rotation).items()}
        return self.decode(parts, states.shape[-1], self.rotation)


def _finite(sizes: Tensor, what: str = "states") -> Tensor:
    """`sizes`, which NaN and infinity reach from what they were computed of, if all are finite."""
    if not bool(torch.isfinite(sizes).all()):
        raise UserError(f"{what} are not finite; load the target with dtype float32, or repair its weights")
    return sizes


def _plain(dtype: torch.dtype, tolerance: float, kl: float) -> StateCodec:
    def encode(states: Tensor, rotation: int | None) -> Parts:
        stored = states.to(dtype)
        _finite(torch.stack(stored.aminmax()) if stored.numel() else stored)
        return {"": stored}

    return StateCodec(
        encode=encode,
        decode=lambda parts, width, rotation: parts[""].to(torch.float32),
        parts=("",),
        bytes_per_state=lambda width: width * dtype.itemsize,
        tolerance=tolerance,
        kl=kl,
    )


def _largest(states: Tensor) -> Tensor:
    """Absolute size of the largest entry of each state, [N, A]."""
    least, most = states.aminmax(dim=-1)
    return _finite(torch.maximum(most, -least))


def _scale(largest: Tensor, steps: float) -> Tensor:
    """largest / steps [N, A] in bf16 (any exponent of a float32), never rounded down, so that nothing overflows."""
    return (largest / steps * (1 + 2**-7)).to(torch.bfloat16)


def _inverse(scale: Tensor) -> Tensor:
    """1 / scale [N, A] as float32 [N, A, 1]; 0 where that is no number: states below about 1e-38 are stored as zeros."""
    inverse = 1 / scale.to(torch.float32)
    return torch.where(torch.isfinite(inverse), inverse, 0.0)[..., None]


def _encode_fp8(states: Tensor, rotation: int | None) -> Parts:
    states = states.to(torch.float32)
    scale = _scale(_largest(states), FP8_MAX)
    return {"": (states * _inverse(scale)).to(torch.float8_e4m3fn), "scale": scale}


def _decode_fp8(parts: Stored, width: int, rotation: int | None) -> Tensor:
    values = torch.from_numpy(FP8_VALUES.take(parts[""].view(torch.uint8).numpy()))  # faster than the library's cast
    return values.mul_(parts["scale"].to(torch.float32)[..., None])


def _encode_int8(states: Tensor, rotation: int | None) -> Parts:
    assert rotation is not None  # without it one huge entry would round all others to zero
    states = rotate(states.to(torch.float32), rotation)
    scale = _scale(_largest(states), 127)
    return {"": (states * _inverse(scale)).round_().to(torch.int8), "scale": scale}


def _decode_int8(parts: Stored, width: int, rotation: int | None) -> Tensor:
    assert rotation is not None
    return rotate(parts[""].to(torch.float32).mul_(parts["scale"].to(torch.float32)[..., None]), rotation, back=True)


def _encode_int4(states: Tensor, rotation: int | None) -> Parts:
    """Turn, divide by the root mean square, take the nearest level; the scale is then the least-squares one, x·c / c·c."""
    assert rotation is not None  # what makes the levels right
    x = rotate(states.to(torch.float32), rotation).cpu()  # the rest is look-ups, which numpy does fastest
    # Summed in doubles: squares can neither overflow nor vanish.
    norm = _finite(torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float64))
    rms = (norm / x.shape[-1] ** 0.5).to(torch.float32).clamp_min_(1e-35)
    cells = (x * (1 / (CELL * rms))).add_(CELLS / 2).clamp_(0, CELLS - 1).to(torch.uint8).numpy()
    levels = torch.from_numpy(NEAREST_LEVEL.take(cells))
    scale = torch.linalg.vecdot(x, levels) / torch.linalg.vecdot(levels, levels)
    codes = torch.from_numpy(NEAREST.take(cells))
    if x.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return {"": codes[..., 0::2] | (codes[..., 1::2] << 4), "scale": scale.to(torch.bfloat16)}


def _decode_int4(parts: Stored, width: int, rotation: int | None) -> Tensor:
    assert rotation is not None
    pairs = torch.view_as_real(torch.from_numpy(PAIRS.take(parts[""].numpy()))).flatten(-2)
    return rotate(pairs[..., :width] * parts["scale"].to(torch.float32)[..., None], rotation, back=True)


# A target that computes in bf16 differs between two batches by about 2⁻⁸ itself; in fp32 only summation order is left.
# Largest error of a state and mean KL on the demo: fp8 0.031 and 0.0004, int8 0.013 and 0.00003, int4 0.16 and 0.0054.
# The bounds leave a factor of two for the error and, as KL grows with the scale of a target's logits, of ten for it.
STATE_CODECS: dict[str, StateCodec] = {
    "fp32": _plain(torch.float32, tolerance=1e-4, kl=1e-6),
    "bf16": _plain(torch.bfloat16, tolerance=2**-7, kl=1e-3),
    "fp8": StateCodec(_encode_fp8, _decode_fp8, SCALED, lambda width: width + 2, tolerance=0.0625, kl=4e-3),
    "int8": StateCodec(
        _encode_int8, _decode_int8, SCALED, lambda width: width + 2, tolerance=0.025, kl=1e-3, rotation=0
    ),
    "int4": StateCodec(
        _encode_int4, _decode_int4, SCALED, lambda width: (width + 1) // 2 + 2, tolerance=0.32, kl=6e-2, rotation=0
    ),
}


@dataclass(frozen=True)
class DistributionCodec:
    """Logits [N, V] -> parts with N entries each -> the arrays of `CachedRow.distribution`.

    encode(logits, k, uniforms [N] in [0, 1)): `uniforms` are what a random codec draws with. mass(parts): the probability
    that the stored tokens cover, [N]. tolerance: largest mean error, in nats, of a stored log-probability, each weighted with
    its probability. most: the largest k. `encode` raises `UserError` for logits that are not finite.
    """

    encode: Callable[[Tensor, int, Tensor], Parts]
    decode: Callable[[Stored], tuple[Tensor, ...] | None]
    mass: Callable[[Stored], Tensor]
    parts: tuple[str, ...]
    bytes_per_token: Callable[[int, int], int]
    tolerance: float
    most: int | None = None


def id_type(vocabulary: int) -> torch.dtype:
    """The smallest unsigned type that holds every id of a vocabulary."""
    return torch.uint8 if vocabulary <= 1 << 8 else torch.uint16 if vocabulary <= 1 << 16 else torch.uint32


def _log_softmax(logits: Tensor) -> Tensor:
    """log p over the whole vocabulary. A logit of −∞ is a token of probability 0; else all must be finite."""
    log_p = torch.log_softmax(logits.to(torch.float32), dim=-1)
    _finite(log_p.amax(-1), "logits")
    return log_p


def _encode_topk(logits: Tensor, k: int, uniforms: Tensor) -> Parts:
    """The k likeliest tokens and their log_softmax over the whole vocabulary: the rest of the mass is 1 − Σ exp."""
    values, ids = _log_softmax(logits).topk(k, dim=-1)
    return {"ids": ids.to(id_type(logits.shape[-1])), "log_probs": values}


def _encode_topk8(logits: Tensor, k: int, uniforms: Tensor) -> Parts:
    """As `topk`, each log-probability as a byte: how far it lies below the likeliest, in squares, so that steps are small
    where mass is. The k tokens' whole mass is kept as it is, and decoding gives them just that."""
    values, ids = _log_softmax(logits).topk(k, dim=-1)
    below = (values[:, :1] - values).clamp_max(-NO_MASS)
    span = _scale(below[:, -1], 1.0)
    levels = (below * _inverse(span)).sqrt_().mul_(255).round_()
    return {
        "ids": ids.to(id_type(logits.shape[-1])),
        "levels": levels.to(torch.uint8),
        "span": span,
        "mass": values.exp().sum(-1),
    }


def _decode_topk8(parts: Stored) -> tuple[Tensor, ...]:
    levels = parts["levels"].to(torch.float32) / 255
    log_p = torch.log_softmax(-parts["span"].to(torch.float32)[:, None] * levels.square_(), dim=-1)
    return parts["ids"].to(torch.int64), log_p + parts["mass"].log()[:, None]


def _encode_sampled(logits: Tensor, k: int, uniforms: Tensor) -> Parts:
    """k systematic draws: the points (u + i) / k, i < k, through the cumulative distribution.

    With u uniform a token of probability p is met k·p times on average, and never more than one time off: E[count / k] = p,
    |count / k − p| < 1 / k. Of independent draws the variance is p (1 − p) / k, of these at most 1 / (4 k²).
    Stored are the distinct tokens, their counts and true log-probabilities; a count of 0 marks an unused place.
    """
    log_p = _log_softmax(logits)
    cumulative = log_p.double().exp_().cumsum_(-1)
    points = (uniforms[:, None].double() + torch.arange(k, device=logits.device)) / k * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, points, right=True).clamp_max_(logits.shape[-1] - 1)
    first = torch.ones_like(drawn, dtype=torch.bool)
    first[:, 1:] = drawn[:, 1:] != drawn[:, :-1]
    place = first.cumsum(-1) - 1  # draws come in the order of ids: equal ones stand together
    ids = torch.zeros_like(drawn).scatter_(-1, place, drawn)
    counts = torch.zeros_like(drawn).scatter_add_(-1, place, torch.ones_like(drawn))
    return {
        "ids": ids.to(id_type(logits.shape[-1])),
        "counts": counts.to(torch.uint8),
        "log_probs": log_p.gather(-1, ids).to(torch.float16),
    }


def _decode_sampled(parts: Stored) -> tuple[Tensor, ...]:
    counts = parts["counts"].to(torch.float32)
    used = counts > 0
    ids = torch.where(used, parts["ids"].to(torch.int64), -1)
    return ids, torch.where(used, parts["log_probs"].to(torch.float32), NO_MASS), counts / counts.sum(-1, keepdim=True)


def _sampled_mass(parts: Stored) -> Tensor:
    return torch.where(parts["counts"] > 0, parts["log_probs"].to(torch.float32).exp(), 0.0).sum(-1)


# Mean error on the demo: topk8 0.003 at k = 64 and 0.01 at k = V = 4096, sampled 0.0003; the bounds leave more than that again.
# In half precision a log-probability above −16 is within 2⁻⁸, one above −1 within 2⁻¹²: as a factor of p next to the noise of
# the draws it is nothing, and a divergence's gradient in q does not contain it.
DISTRIBUTION_CODECS: dict[str, DistributionCodec] = {
    "topk": DistributionCodec(
        encode=_encode_topk,
        decode=lambda parts: (parts["ids"].to(torch.int64), parts["log_probs"]),
        mass=lambda parts: parts["log_probs"].exp().sum(-1),
        parts=("ids", "log_probs"),
        bytes_per_token=lambda vocabulary, k: k * (id_type(vocabulary).itemsize + 4),
        tolerance=1e-4,
    ),
    "topk8": DistributionCodec(
        encode=_encode_topk8,
        decode=_decode_topk8,
        mass=lambda parts: parts["mass"],
        parts=("ids", "levels", "span", "mass"),
        bytes_per_token=lambda vocabulary, k: k * (id_type(vocabulary).itemsize + 1) + 2 + 4,
        tolerance=0.03,
    ),
    "sampled": DistributionCodec(
        encode=_encode_sampled,
        decode=_decode_sampled,
        mass=_sampled_mass,
        parts=("ids", "counts", "log_probs"),
        bytes_per_token=lambda vocabulary, k: k * (id_type(vocabulary).itemsize + 1 + 2),
        tolerance=0.005,
        most=255,
    ),
    "from_last": DistributionCodec(
        encode=lambda logits, k, uniforms: {},
        decode=lambda parts: None,
        mass=lambda parts: torch.ones(()),
        parts=(),
        bytes_per_token=lambda vocabulary, k: 0,
        tolerance=0.0,
    ),
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
