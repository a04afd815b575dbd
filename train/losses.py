"""Divergences between the target p and the draft q: pure functions of (draft logits, teacher), one value per position.

Masks, weights and means live elsewhere. A teacher knows the probability of some tokens (of all, or of the k likeliest) and the
total of the rest; none of these functions renormalises what it does not know. Notation: q = softmax(logits).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

TINY = 1e-30


@dataclass(frozen=True)
class Teacher:
    """The target's distribution at N positions.

    ids [N, k]: draft ids of the tokens whose probability is known, −1 for those the draft cannot say. p [N, k]: their true
    probabilities. The rest, 1 − Σ p, is one bucket: any token not listed.
    """

    ids: Tensor
    p: Tensor


def dense_teacher(p: Tensor) -> Teacher:
    """A teacher that knows every token: p [N, V] over the draft's own vocabulary."""
    return Teacher(torch.arange(p.shape[-1], device=p.device).expand_as(p), p)


def _log_q(logits: Tensor, teacher: Teacher) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log q of the listed tokens [N, k] (0 where the draft cannot say them), p of those it can (0 elsewhere), log q of the
    rest [N], and the target's mass on the rest [N] (0 where the draft has no other token: what is left there is rounding)."""
    logits = logits.float()
    log_normaliser = logits.logsumexp(-1, keepdim=True)
    known = teacher.ids >= 0
    log_q = torch.where(known, logits.gather(-1, teacher.ids.clamp(min=0)) - log_normaliser, 0.0)
    # One column more than the vocabulary takes the tokens that the draft cannot say.
    listed = torch.zeros(logits.shape[0], logits.shape[1] + 1, dtype=torch.bool, device=logits.device)
    listed.scatter_(-1, torch.where(known, teacher.ids, logits.shape[1]), True)
    listed = listed[:, :-1]
    # The dtype's minimum, not −∞: if every token is listed, the gradient here must be 0 and not NaN.
    others = logits.masked_fill(listed, torch.finfo(logits.dtype).min)
    complete = listed.all(-1)
    log_q_rest = torch.where(complete, 0.0, others.logsumexp(-1) - log_normaliser.squeeze(-1))
    rest = (1.0 - teacher.p.sum(-1)).clamp(min=0.0)
    return log_q, torch.where(known, teacher.p, 0.0), log_q_rest, torch.where(complete, 0.0, rest)


def soft_cross_entropy(logits: Tensor, teacher: Teacher) -> Tensor:
    """−Σ_v p(v) log q(v), the rest as one bucket: −r log q(rest). [N, V_d], Teacher → [N].

    Its gradient in the logits is q − p, with the rest's mass spread as the draft's own tail spreads it. Tokens outside the
    draft's vocabulary add nothing: no draft can lower their cost, and their mass is not given to others.
    """
    log_q, p, log_q_rest, rest = _log_q(logits, teacher)
    return -(p * log_q).sum(-1) - rest * log_q_rest


def forward_kl(logits: Tensor, teacher: Teacher) -> Tensor:
    """KL(p ‖ q) = Σ_v p log(p / q), the rest as one bucket: the soft cross-entropy less the teacher's entropy. → [N]."""
    log_q, p, log_q_rest, rest = _log_q(logits, teacher)
    log_p, log_rest = p.clamp(min=TINY).log(), rest.clamp(min=TINY).log()
    return (p * (log_p - log_q)).sum(-1) + rest * (log_rest - log_q_rest)


def acceptance(logits: Tensor, teacher: Teacher) -> Tensor:
    """Σ_v min(p, q) over the listed tokens: the probability that a token drawn from q is accepted (Leviathan et al. 2023,
    Corollary 3.6); a lower bound if the teacher does not list all of them. → [N]."""
    log_q, p, _, _ = _log_q(logits, teacher)
    return torch.minimum(p, log_q.exp()).sum(-1)


def total_variation(logits: Tensor, teacher: Teacher) -> Tensor:
    """½ Σ_v |p − q| = 1 − Σ_v min(p, q). → [N]."""
    return 1.0 - acceptance(logits, teacher)


def negative_log_acceptance(logits: Tensor, teacher: Teacher) -> Tensor:
    """−log Σ_v min(p, q) (LK losses, arXiv 2602.23881). → [N]."""
    return -acceptance(logits, teacher).clamp(min=1e-6).log()


def adaptive_kl_tv(logits: Tensor, teacher: Teacher, eta: float = 3.0) -> Tensor:
    """λ KL + (1 − λ) TV with λ = exp(−η α), α the mean acceptance of these positions, without gradient (arXiv 2602.23881).

    KL leads while acceptance is low, where TV has no gradient to speak of; TV, which is acceptance itself, leads later. → [N].
    """
    variation = total_variation(logits, teacher)
    weight = torch.exp(-eta * (1.0 - variation.detach().mean()))
    return weight * forward_kl(logits, teacher) + (1.0 - weight) * variation


LOSSES: dict[str, Callable[[Tensor, Teacher], Tensor]] = {
    "forward_kl": forward_kl,
    "total_variation": total_variation,
    "negative_log_acceptance": negative_log_acceptance,
    "adaptive_kl_tv": adaptive_kl_tv,
}
