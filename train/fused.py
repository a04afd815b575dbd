"""Output head and loss in one: from states to the loss's sum and its gradients, without ever keeping [N, V_d] logits.

Every loss is a function of log q at the teacher's listed tokens and at the rest (`Matched`), so its gradient in the logits is known
once its gradient in these few numbers is:  with g_v for listed v, g_r for the rest, and G = Σ g_v + g_r,

    ∂L/∂z_v = g_v − G q_v  (listed),      ∂L/∂z_v = (g_r / q(rest) − G) q_v  (all others).

Rows go through the head in chunks; a chunk's logits become, in place, their own gradient. Tested against `losses.plain`.
"""

from typing import Any

import torch
from torch import Tensor

from draftsmith.train.losses import Loss, Matched, Teacher, _rest, acceptance

CHUNK_NUMBERS = 1 << 22  # logits of one chunk: 16 MB in fp32, so that they stay near the processor


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, teacher: Teacher, loss: Loss) -> tuple[Tensor, Tensor]:
        rows = max(1, CHUNK_NUMBERS // weight.shape[0])
        total, accepted = states.new_zeros((), dtype=torch.float32), states.new_zeros((), dtype=torch.float32)
        state_gradient = torch.empty_like(states)
        weight_gradient = torch.zeros_like(weight)
        # Autocast does not reach into a custom function: its dtype is used for the products, fp32 for all sums.
        device = states.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        s, w = states.to(dtype), weight.to(dtype)
        with torch.autocast(device, enabled=False):
            for start in range(0, states.shape[0], rows):
                chunk = slice(start, start + rows)
                value, reached, gradient = _chunk((s[chunk] @ w.mT).float(), teacher[chunk], loss)
                total += value
                accepted += reached
                gradient = gradient.to(dtype)
                state_gradient[chunk] = gradient @ w
                weight_gradient += gradient.mT @ s[chunk]
        ctx.save_for_backward(state_gradient, weight_gradient)
        ctx.mark_non_differentiable(accepted)
        return total, accepted

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor, None, None]:
        state_gradient, weight_gradient = ctx.saved_tensors
        return state_gradient * upstream[0], weight_gradient * upstream[0], None, None


def _chunk(z: Tensor, teacher: Teacher, loss: Loss) -> tuple[Tensor, Tensor, Tensor]:
    """Loss sum, acceptance sum, and the loss's gradient in the logits z [n, V_d] fp32, which it overwrites."""
    known = teacher.ids >= 0
    ids = teacher.ids.clamp(min=0)
    listed = z.gather(1, ids)
    # Listed logits become −∞; a token that the draft cannot say points at token 0 and leaves it as it is.
    z.scatter_reduce_(1, ids, torch.where(known, -torch.inf, torch.inf), "amin")
    tail = z.logsumexp(1)
    normaliser = torch.logaddexp(tail, listed.masked_fill(~known, -torch.inf).logsumexp(1))
    complete = known.sum(1) == z.shape[1]
    with torch.enable_grad():
        log_q = torch.where(known, listed - normaliser[:, None], 0.0).requires_grad_()
        log_q_rest = torch.where(complete, 0.0, tail - normaliser).requires_grad_()
        matched = Matched(log_q, torch.where(known, teacher.p, 0.0), log_q_rest, _rest(teacher, complete))
        value = loss(matched).sum()
        g, g_rest = torch.autograd.grad(value, (log_q, log_q_rest), materialize_grads=True)
    total = torch.where(known, g, 0.0).sum(1) + torch.where(complete, 0.0, g_rest)
    # All others, with q(v) = q(rest) · exp(z_v − tail): neither factor overflows however small q(rest) is.
    scale = torch.where(complete, 0.0, g_rest - total * log_q_rest.detach().exp())
    gradient = z.sub_(torch.where(complete, 0.0, tail)[:, None]).exp_().mul_(scale[:, None])
    gradient.scatter_add_(1, ids, torch.where(known, g - total[:, None] * log_q.detach().exp(), 0.0))
    return value.detach(), acceptance(matched).sum().detach(), gradient


def head_loss(states: Tensor, weight: Tensor, teacher: Teacher, loss: Loss) -> tuple[Tensor, Tensor]:
    """Σ over the N positions of `loss` at logits = states · weightᵀ, and Σ of the expected acceptance (without gradient).

    states [N, H], weight [V_d, H]. A loss that looks across positions (adaptive weights) sees one chunk at a time.
    """
    return _HeadLoss.apply(states, weight, teacher, loss)
