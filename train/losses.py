"""Divergences between the target p and the draft q: pure functions, one value per position.

Masks, weights and means live elsewhere, and no loss looks across positions: rows come in chunks, batches and ranks, and none of
these may matter. A teacher knows the probability of some tokens (of all, of the k likeliest, of some draws); none of these
functions renormalises what it does not know. Each is written once, as a function of what p and q say of the known tokens and of
the rest (`Matched`); `plain` applies it to logits, `draftsmith.train.fused` to states.

**The rest** of a top-k teacher has mass r under the target and s under the draft. It is seen in one of two ways:

- `bucket`: one more outcome, of which nothing is known but its mass. KL and JS count it as such, f(r, s); the acceptance counts
  nothing of it, since no token in it is known to be accepted: a lower bound of the true α.
- `tail`: the target spreads r as the draft spreads s, p_v = r q_v / s. Then the sum of f(p_v, q_v) over the rest is f(r, s) again
  for every f-divergence, and so is the gradient with p_v held constant: for KL and JS the two are one. The acceptance counts
  Σ_v min(r q_v / s, q_v) = min(r, s): an upper bound, for the minimum of two sums is at least the sum of the minima.

Tokens outside the draft's vocabulary have q = 0: they are lost acceptance, and add a constant (left out) to KL and JS.

**Sampled teachers** give Σ_v c_v f(p_v, q_v) with E[c_v] = 1: unbiased, gradient included, for all but `negative_log_acceptance`,
`adaptive_kl_tv` and `top_k_cross_entropy`, which are no sums over the tokens that were drawn.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.train.settings import LossName, Rest, TrainSettings
from draftsmith.train.teachers import TINY, Teacher

NEVER = -1e4  # log q of what cannot be drafted: its exponential is 0, and 0 times it is 0
RESOLUTION = 2**-24  # 1 − Σ p of fp32 probabilities says nothing below this


@dataclass(frozen=True)
class Matched:
    """p and q where both are known. log_q, p [N, k]: of the listed tokens (NEVER and 0 where the draft cannot say them);
    log_q_rest, rest [N]: of all others (NEVER and 0 if there are none, or if the teacher is sampled); scale [N, k]: what a column
    counts (None: 1), for sampled teachers weight / p; log_q_token [N]: of the text's own token, where asked for (0 if the draft
    cannot say it)."""

    log_q: Tensor
    p: Tensor
    log_q_rest: Tensor
    rest: Tensor
    scale: Tensor | None = None
    log_q_token: Tensor | None = None


Divergence = Callable[[Matched], Tensor]


def match(logits: Tensor, teacher: Teacher, temperature: float = 1.0) -> Matched:
    """Draft logits [N, V_d] and a teacher of the same positions, reduced to what losses need, both at one temperature."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if temperature != 1.0:
        logits, teacher = logits / temperature, teacher.tempered(temperature)
    log_normaliser = logits.logsumexp(-1, keepdim=True)
    tokens = teacher.tokens
    of_token = None if tokens is None else logits.gather(-1, tokens.clamp(min=0)[:, None]).squeeze(-1)
    token = log_q_token(of_token, log_normaliser.squeeze(-1), teacher)
    if teacher.ids is None:
        nothing = logits.new_zeros(len(logits))
        p = teacher.p[:, : logits.shape[1]]
        return Matched(logits - log_normaliser, p, nothing + NEVER, nothing, None, token)
    known = teacher.ids >= 0
    log_q = torch.where(known, logits.gather(-1, teacher.ids.clamp(min=0)) - log_normaliser, NEVER)
    # One column more than the vocabulary takes the tokens that the draft cannot say.
    listed = torch.zeros(logits.shape[0], logits.shape[1] + 1, dtype=torch.bool, device=logits.device)
    listed.scatter_(-1, torch.where(known, teacher.ids, logits.shape[1]), True)
    # The dtype's minimum, not −∞: if every token is listed, the gradient here must be 0 and not NaN.
    others = logits.masked_fill(listed[:, :-1], torch.finfo(logits.dtype).min)
    log_q_rest = others.logsumexp(-1) - log_normaliser.squeeze(-1)
    return listed_match(log_q, log_q_rest, known, has_rest(teacher, known, logits.shape[1]), teacher, token)


def log_q_token(logit: Tensor | None, log_normaliser: Tensor, teacher: Teacher) -> Tensor | None:
    """log q [N] of the text's own token from its logit [N] and Σ_v exp(logit_v), 0 where the draft cannot say it."""
    return None if logit is None else sayable(logit - log_normaliser, teacher)


def sayable(of_token: Tensor, teacher: Teacher) -> Tensor:
    """Values [N] of the text's own tokens, 0 where the draft cannot say them or nobody asks for them."""
    return of_token if teacher.tokens is None else torch.where(teacher.tokens >= 0, of_token, 0.0)


def has_rest(teacher: Teacher, known: Tensor, vocabulary: int) -> Tensor:
    """bool [N]: whether tokens that are not listed have mass of their own: not if all are listed, nor if the list was drawn."""
    return known.sum(-1) < vocabulary if teacher.weight is None else torch.zeros_like(known[:, 0])


def listed_match(
    log_q: Tensor, log_q_rest: Tensor, known: Tensor, rest: Tensor, teacher: Teacher, token: Tensor | None
) -> Matched:
    """The `Matched` of a teacher that lists tokens; known [N, k], rest [N]: which columns and which rests count."""
    mass = (1.0 - teacher.p.sum(-1)).clamp(min=RESOLUTION)
    scale = None if teacher.weight is None else torch.where(known, teacher.weight / teacher.p.clamp(min=TINY), 0.0)
    return Matched(
        log_q,
        torch.where(known, teacher.p, 0.0),
        torch.where(rest, log_q_rest, NEVER),
        torch.where(rest, mass, 0.0),
        scale,
        token,
    )


def _log(p: Tensor) -> Tensor:
    return p.clamp(min=TINY).log()


def _total(m: Matched, term: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Σ_v term(p_v, log q_v) over the listed tokens and the rest. → [N]."""
    listed = term(m.p, m.log_q)
    return (listed if m.scale is None else m.scale * listed).sum(-1) + term(m.rest, m.log_q_rest)


def forward_kl(m: Matched) -> Tensor:
    """KL(p ‖ q) = Σ_v p log(p / q), the rest as r log(r / s). → [N].

    Its gradient in the logits is that of the soft cross-entropy, q − p, with the rest's mass spread as the draft's own tail spreads
    it. Tokens outside the draft's vocabulary add nothing: no draft can lower their cost, and their mass is not given to others.
    """
    return _total(m, lambda p, log_q: p * (_log(p) - log_q))


def reverse_kl(m: Matched) -> Tensor:
    """KL(q ‖ p) = Σ_v q log(q / p), the rest as s log(s / r). Seeks modes: mass where the target has none is dear. → [N].

    Sampled teachers draw from p: what q says where p is small is seen seldom and weighs much, unbiased but of large variance.
    """
    return _total(m, lambda p, log_q: log_q.exp() * (log_q - _log(p)))


def jensen_shannon(m: Matched, beta: float = 0.5) -> Tensor:
    """[β KL(p ‖ m) + (1 − β) KL(q ‖ m)] / [β (1 − β)] with m = β p + (1 − β) q (Agarwal et al. 2023, arXiv 2306.13649). → [N].

    Divided by β (1 − β), which the paper does not do: so the loss is KL(p ‖ q) at β = 0 and KL(q ‖ p) at β = 1, without a jump, and
    all β agree for q near p. β = ½ is four times the Jensen–Shannon divergence. Every token also gets (1 − 2β)(p − q), which sums
    to 0 over the vocabulary: with it each term, and so a sampled or pruned sum of them, tends to that of the KL.
    """
    if beta in (0.0, 1.0):
        return reverse_kl(m) if beta else forward_kl(m)
    log_beta, log_gamma = math.log(beta), math.log1p(-beta)

    def term(p: Tensor, log_q: Tensor) -> Tensor:
        log_ratio = log_q - _log(p)
        # log(m / p) and log(m / q), each free of cancellation where it is divided by a small number.
        over_p = torch.logaddexp(torch.full_like(log_ratio, log_beta), log_gamma + log_ratio)
        over_q = torch.logaddexp(torch.full_like(log_ratio, log_gamma), log_beta - log_ratio)
        q = log_q.exp()
        return (1 - 2 * beta) * (p - q) - p * over_p / (1 - beta) - q * over_q / beta

    return _total(m, term)


def acceptance(m: Matched, rest: Rest = "bucket") -> Tensor:
    """Σ_v min(p, q): the probability that a token drawn from q is accepted (Leviathan et al. 2023, Corollary 3.6). → [N].

    Of a truncated teacher: over its listed tokens, a lower bound (`bucket`); with min(r, s), an upper one (`tail`). Of a sampled
    teacher: Σ_v weight · min(1, q / p), unbiased and between 0 and 1.
    """
    listed = torch.minimum(m.p, m.log_q.exp())
    total = (listed if m.scale is None else m.scale * listed).sum(-1)
    return total + torch.minimum(m.rest, m.log_q_rest.exp()) if rest == "tail" else total


def total_variation(m: Matched, rest: Rest = "bucket") -> Tensor:
    """½ Σ_v |p − q| = 1 − Σ_v min(p, q), over the target's whole vocabulary. → [N]."""
    return 1.0 - acceptance(m, rest)


def negative_log_acceptance(m: Matched, rest: Rest = "bucket") -> Tensor:
    """−log Σ_v min(p, q) (LK losses, arXiv 2602.23881): the gradient of TV, divided by the acceptance. → [N].

    Not unbiased for sampled teachers: −log of a mean is less than the mean of −log, by about Var(α̂) / 2α².
    """
    return -acceptance(m, rest).clamp(min=1e-12).log()


def adaptive_kl_tv(m: Matched, eta: float = 3.0, rest: Rest = "bucket") -> Tensor:
    """λ KL + (1 − λ) TV with λ = exp(−η α), α the position's own acceptance, without gradient. → [N].

    KL leads while acceptance is low, where TV has no gradient to speak of; TV, which is acceptance itself, leads later. LK losses
    (arXiv 2602.23881) take α of the whole batch; with the position's own the loss depends on neither chunks, batches nor ranks.
    Not unbiased for sampled teachers, whose λ and KL come from the same draws.
    """
    variation = total_variation(m, rest)
    weight = torch.exp(-eta * (1.0 - variation.detach()))
    return weight * forward_kl(m) + (1.0 - weight) * variation


def cross_entropy(m: Matched) -> Tensor:
    """−log q(x) of the text's own token x: what a draft learns without a teacher. 0 where the draft cannot say x. → [N]."""
    assert m.log_q_token is not None, "cross_entropy needs a teacher with `tokens`"
    return -m.log_q_token


def top_k_cross_entropy(m: Matched, top_k: int = 10) -> Tensor:
    """−Σ p log q over the target's `top_k` likeliest tokens, p not renormalised (HASS, arXiv 2408.15766, section 3.1). → [N].

    Of a cache that keeps fewer tokens, or drew them, over the likeliest of those: a drawn list is no estimate of this sum.
    """
    p, columns = m.p.topk(min(top_k, m.p.shape[-1]))
    return -(p * m.log_q.gather(-1, columns)).sum(-1)


LOSSES: dict[str, Callable[..., Tensor]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jensen_shannon": jensen_shannon,
    "total_variation": total_variation,
    "negative_log_acceptance": negative_log_acceptance,
    "adaptive_kl_tv": adaptive_kl_tv,
    "cross_entropy": cross_entropy,
    "top_k_cross_entropy": top_k_cross_entropy,
}


@dataclass(frozen=True)
class Loss:
    """What is minimised: Σ of weight · divergence, with p and q at a temperature. A `Divergence` itself, once both are.

    The temperature is that of distillation (Hinton et al. 2015, arXiv 1503.02531) without its factor T²: one temperature holds
    for all parts, and the optimisers do not see the loss's scale.
    """

    parts: tuple[tuple[float, Divergence], ...] = ((1.0, forward_kl),)
    temperature: float = 1.0
    needs_tokens: bool = False

    def __call__(self, m: Matched) -> Tensor:
        return functools.reduce(torch.add, [weight * divergence(m) for weight, divergence in self.parts])


def make_loss(settings: TrainSettings) -> Loss:
    """The loss that `loss`, `beta`, `eta`, `rest`, `top_k` and `temperature` of the settings describe."""
    options: dict[LossName, dict[str, Any]] = {
        "jensen_shannon": {"beta": settings.beta},
        "total_variation": {"rest": settings.rest},
        "negative_log_acceptance": {"rest": settings.rest},
        "adaptive_kl_tv": {"eta": settings.eta, "rest": settings.rest},
        "top_k_cross_entropy": {"top_k": settings.top_k},
    }
    parts = tuple(
        (weight, functools.partial(LOSSES[name], **options.get(name, {}))) for name, weight in settings.mixture.items()
    )
    return Loss(parts, settings.temperature, "cross_entropy" in settings.mixture)


def plain(divergence: Divergence, logits: Tensor, teacher: Teacher, temperature: float = 1.0) -> Tensor:
    """A loss of draft logits [N, V_d]: the reference for `draftsmith.train.fused`. → [N]."""
    return divergence(match(logits, teacher, temperature))
