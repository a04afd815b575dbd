"""Output head and loss in one: from states to the loss's sum and its gradients, without ever keeping [N, V_d] logits.

Every loss is a function of log q at the teacher's listed tokens, at the rest and at the text's token (`Matched`), so its gradient
in the logits is known once its gradient in these few numbers is:  with g_v for listed v, g_r for the rest, g_x for the text's
token x (which may be listed, too), and G = Σ g_v + g_r + g_x,

    ∂L/∂z_v = g_v − G q_v  (listed),      ∂L/∂z_v = (g_r / q(rest) − G) q_v  (all others),      and g_x more at v = x.

Rows go through the head in chunks; a chunk's logits become, in place, their own gradient. Tested against `losses.plain`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from draftsmith.train.losses import (
    NEVER,
    Divergence,
    Matched,
    acceptance,
    has_rest,
    listed_match,
    log_q_token,
    match,
    sayable,
)
from draftsmith.train.teachers import AnyTeacher, Teacher

CHUNK_NUMBERS = 1 << 22  # logits of one chunk: 16 MB in fp32, so that they stay near the processor


def _chunks(rows: int, columns: int) -> list[slice]:
    size = max(1, CHUNK_NUMBERS // columns)
    return [slice(start, start + size) for start in range(0, rows, size)]


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        teacher: AnyTeacher,
        loss: Divergence,
        temperature: float,
        weights: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        # Autocast does not reach into a custom function: its dtype is used for the products, fp32 for all sums.
        device = states.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        exact = torch.promote_types(dtype, torch.float32)
        total, accepted = states.new_zeros((), dtype=exact), states.new_empty(len(states), dtype=exact)
        state_gradient = torch.empty_like(states)
        # A frozen head has no use for a gradient.
        weight_gradient = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        s, w = states.to(dtype), weight.to(dtype)
        with torch.autocast(device, enabled=False):
            for chunk in _chunks(len(states), max(len(weight), teacher.columns)):
                own = None if weights is None else weights[chunk]
                value, reached, gradient = _chunk((s[chunk] @ w.mT).to(exact), teacher[chunk], loss, temperature, own)
                total += value
                accepted[chunk] = reached
                gradient = gradient.to(dtype)
                state_gradient[chunk] = gradient @ w
                if weight_gradient is not None:
                    weight_gradient += gradient.mT @ s[chunk]
        ctx.save_for_backward(state_gradient, weight_gradient)
        ctx.mark_non_differentiable(accepted)
        return total, accepted

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        state_gradient, weight_gradient = ctx.saved_tensors
        of_weight = None if weight_gradient is None else weight_gradient * upstream[0]
        return state_gradient * upstream[0], of_weight, None, None, None, None


def _chunk(
    z: Tensor, teacher: Teacher, loss: Divergence, temperature: float, weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss sum, acceptance [n], and the loss's gradient in the logits z [n, V_d], which it overwrites."""
    if temperature == 1.0:
        return _chunk_gradient(z, teacher, loss, weights)
    accepted = acceptance(match(z, teacher))
    value, _, gradient = _chunk_gradient(z.div_(temperature), teacher.tempered(temperature), loss, weights)
    return value, accepted, gradient.div_(temperature)


def _chunk_gradient(
    z: Tensor, teacher: Teacher, loss: Divergence, weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    tokens = teacher.tokens
    of_token = None if tokens is None else z.gather(1, tokens.clamp(min=0)[:, None]).squeeze(1)
    by_columns = _all_tokens if teacher.ids is None else _listed_tokens
    value, accepted, gradient, g_token = by_columns(z, teacher, loss, weights, of_token)
    if tokens is not None:
        gradient.scatter_add_(1, tokens.clamp(min=0)[:, None], g_token[:, None])
    return value, accepted, gradient


def _derivatives(
    matched: Matched, loss: Divergence, weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss sum, acceptance [n], and the loss's derivatives in log q: of listed tokens [n, k], of the rest [n], of x [n]."""
    token = torch.zeros_like(matched.rest) if matched.log_q_token is None else matched.log_q_token
    leaves = [tensor.requires_grad_() for tensor in (matched.log_q, matched.log_q_rest, token)]
    with torch.enable_grad():
        values = loss(matched)
        value = (values if weights is None else weights * values).sum()
        g, g_rest, g_token = torch.autograd.grad(value, leaves, materialize_grads=True)
    return value.detach(), acceptance(matched).detach(), g, g_rest, g_token


def _all_tokens(
    z: Tensor, teacher: Teacher, loss: Divergence, weights: Tensor | None, of_token: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A chunk of a teacher that knows every token: no rest, ∂L/∂z_v = g_v − G q_v for all v."""
    normaliser = z.logsumexp(1)
    log_q = z.sub_(normaliser[:, None])
    nothing = torch.zeros_like(normaliser)
    token = log_q_token(of_token, normaliser, teacher)
    matched = Matched(log_q, teacher.p[:, : z.shape[1]], nothing + NEVER, nothing, None, token)
    value, accepted, g, _, g_token = _derivatives(matched, loss, weights)
    g_token = sayable(g_token, teacher)
    total = g.sum(1) + g_token
    return value, accepted, log_q.detach().exp_().mul_(-total[:, None]).add_(g), g_token


def _listed_tokens(
    z: Tensor, teacher: Teacher, loss: Divergence, weights: Tensor | None, of_token: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A chunk of a teacher that lists some tokens."""
    assert teacher.ids is not None
    known = teacher.ids >= 0
    ids = teacher.ids.clamp(min=0)
    listed = z.gather(1, ids)
    # Listed logits become −∞; a token that the draft cannot say points at token 0 and leaves it as it is.
    z.scatter_reduce_(1, ids, torch.where(known, -torch.inf, torch.inf).to(z.dtype), "amin")
    largest = z.amax(1).clamp(min=torch.finfo(z.dtype).min)  # of the tail, which may be empty
    others = z.sub_(largest[:, None]).exp_()
    mass = others.sum(1)
    tail = largest + mass.log()
    normaliser = torch.logaddexp(tail, listed.masked_fill(~known, -torch.inf).logsumexp(1))
    log_q, log_q_rest = torch.where(known, listed - normaliser[:, None], NEVER), tail - normaliser
    rest = has_rest(teacher, known, z.shape[1])
    matched = listed_match(log_q, log_q_rest, known, rest, teacher, log_q_token(of_token, normaliser, teacher))
    value, accepted, g, g_rest, g_token = _derivatives(matched, loss, weights)
    g, g_rest, g_token = torch.where(known, g, 0.0), torch.where(rest, g_rest, 0.0), sayable(g_token, teacher)
    total = g.sum(1) + g_rest + g_token
    # All others, with q(v) = q(rest) · exp(z_v − tail): neither factor overflows however small q(rest) is.
    scale = torch.where(mass > 0, (g_rest - total * log_q_rest.exp()) / mass, 0.0)
    gradient = others.mul_(scale[:, None])
    gradient.scatter_add_(1, ids, torch.where(known, g - total[:, None] * log_q.detach().exp(), 0.0))
    return value, accepted, gradient, g_token


def head_loss(
    states: Tensor,
    weight: Tensor,
    teacher: AnyTeacher,
    loss: Divergence,
    temperature: float = 1.0,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Σ over the N positions of `weights` [N] (None: 1 each) · `loss` at logits = states · weightᵀ, p and q at `temperature`; and
    the expected acceptance [N] at temperature 1, without gradient. states [N, H], weight [V_d, H]."""
    return _HeadLoss.apply(states, weight, teacher, loss, temperature, weights)


def recomputed_loss(
    states: Tensor,
    logits: Callable[[Tensor], Tensor],
    vocabulary: int,
    teacher: AnyTeacher,
    loss: Divergence,
    temperature: float = 1.0,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same for a head that is no mere matrix (bias, scale, soft-cap): logits [n, H] → [n, V_d] are made once more on the way
    back instead of being kept. `logits` must be deterministic; vocabulary: V_d."""

    def of(some: Tensor, rows: slice, own: Tensor | None) -> tuple[Tensor, Tensor]:
        z, taught = logits(some), teacher[rows]  # here, so that a recomputed teacher is not kept either
        values = loss(match(z, taught, temperature))
        accepted = acceptance(match(z.detach(), taught))
        return (values if own is None else own * values).sum(), accepted

    exact = torch.promote_types(states.dtype, torch.float32)
    total, accepted = states.new_zeros((), dtype=exact), [states.new_zeros(0, dtype=exact)]
    chunks = _chunks(len(states), max(vocabulary, teacher.columns))
    # Split, not sliced: on the way back every slice would make a gradient as large as all states.
    for chunk, some in zip(chunks, states.split([len(states[c]) for c in chunks]), strict=True):
        own = None if weights is None else weights[chunk]
        value, reached = checkpoint(of, some, chunk, own, use_reentrant=False)
        total = total + value
        accepted.append(reached.detach())
    return total, torch.cat(accepted)
