"""Divergences between the target p and the draft q: pure functions, one value per position.

Masks, weights and means live elsewhere. A teacher knows the probability of some tokens (of all, or of the k likeliest) and the
total of the rest; none of these functions renormalises what it does not know. Each loss is written once, as a function of what
p and q say of the listed tokens and of the rest (`Matched`); `plain` applies it to logits, `draftsmith.train.fused` to states.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

TINY = 1e-30


@dataclass(frozen=True)
class Teacher:
    """The target's distribution at N positions.

    ids [N, k]: distinct draft ids of the tokens whose probability is known, −1 for those the draft cannot say. p [N, k]: their true
    probabilities. The rest, 1 − Σ p, is one bucket: any token not listed.
    """

    ids: Tensor
    p: Tensor

    def __getitem__(self, rows: slice) -> "Teacher":
        return Teacher(self.ids[rows], self.p[rows])


def dense_teacher(p: Tensor) -> Teacher:
    """A teacher that knows every token: p [N, V] over the draft's own vocabulary."""
    return Teacher(torch.arange(p.shape[-1], device=p.device).expand_as(p), p)


@dataclass(frozen=True)
class Matched:
    """p and q where both are known. log_q, p [N, k]: of the listed tokens (both 0 where the draft cannot say them); log_q_rest,
    rest [N]: of all others (both 0 where the draft has no other token: what is left of the target's mass there is rounding)."""

    log_q: Tensor
    p: Tensor
    log_q_rest: Tensor
    rest: Tensor


Loss = Callable[[Matched], Tensor]


def match(logits: Tensor, teacher: Teacher) -> Matched:
    """Draft logits [N, V_d] and a teacher of the same positions, reduced to what losses need. q = softmax(logits)."""
    logits = logits.float()
    log_normaliser = logits.logsumexp(-1, keepdim=True)
    known = teacher.ids >= 0
    log_q = torch.where(known, logits.gather(-1, teacher.ids.clamp(min=0)) - log_normaliser, 0.0)
    # One column more than the vocabulary takes the tokens that the draft cannot say.
    listed = torch.zeros(logits.shape[0], logits.shape[1] + 1, dtype=torch.bool, device=logits.device)
    listed.scatter_(-1, torch.where(known, teacher.ids, logits.shape[1]), True)
    # The dtype's minimum, not −∞: if every token is listed, the gradient here must be 0 and not NaN.
    others = logits.masked_fill(listed[:, :-1], torch.finfo(logits.dtype).min)
    complete = known.sum(-1) == logits.shape[1]
    log_q_rest = torch.where(complete, 0.0, others.logsumexp(-1) - log_normaliser.squeeze(-1))
    return Matched(log_q, torch.where(known, teacher.p, 0.0), log_q_rest, _rest(teacher, complete))


def _rest(teacher: Teacher, complete: Tensor) -> Tensor:
    return torch.where(complete, 0.0, (1.0 - teacher.p.sum(-1)).clamp(min=0.0))


def forward_kl(m: Matched) -> Tensor:
    """KL(p ‖ q) = Σ_v p log(p / q), the rest as one bucket: r log(r / q(rest)). → [N].

    Its gradient in the logits is that of the soft cross-entropy, q − p, with the rest's mass spread as the draft's own tail spreads
    it. Tokens outside the draft's vocabulary add nothing: no draft can lower their cost, and their mass is not given to others.
    """
    listed = (m.p * (m.p.clamp(min=TINY).log() - m.log_q)).sum(-1)
    return listed + m.rest * (m.rest.clamp(min=TINY).log() - m.log_q_rest)


def acceptance(m: Matched) -> Tensor:
    """Σ_v min(p, q) over the listed tokens: the probability that a token drawn from q is accepted (Leviathan et al. 2023,
    Corollary 3.6); a lower bound if the teacher does not list all of them. → [N]."""
    return torch.minimum(m.p, m.log_q.exp()).sum(-1)


def total_variation(m: Matched) -> Tensor:
    """½ Σ_v |p − q| = 1 − Σ_v min(p, q). → [N]."""
    return 1.0 - acceptance(m)


def negative_log_acceptance(m: Matched) -> Tensor:
    """−log Σ_v min(p, q) (LK losses, arXiv 2602.23881). → [N]."""
    return -acceptance(m).clamp(min=1e-6).log()


def adaptive_kl_tv(m: Matched, eta: float = 3.0) -> Tensor:
    """λ KL + (1 − λ) TV with λ = exp(−η α), α the mean acceptance of these positions, without gradient (arXiv 2602.23881).

    KL leads while acceptance is low, where TV has no gradient to speak of; TV, which is acceptance itself, leads later. → [N].
    """
    variation = total_variation(m)
    weight = torch.exp(-eta * (1.0 - variation.detach().mean()))
    return weight * forward_kl(m) + (1.0 - weight) * variation


LOSSES: dict[str, Loss] = {
    "forward_kl": forward_kl,
    "total_variation": total_variation,
    "negative_log_acceptance": negative_log_acceptance,
    "adaptive_kl_tv": adaptive_kl_tv,
}


def plain(loss: Loss, logits: Tensor, teacher: Teacher) -> Tensor:
    """A loss of draft logits [N, V_d]: the reference for `draftsmith.train.fused`. → [N]."""
    return loss(match(logits, teacher))
