"""Losses against their closed forms, for full and truncated teachers, values and gradients."""

import math

import pytest
import torch

from draftsmith.train import losses
from draftsmith.train.losses import LOSSES, Teacher, dense_teacher, plain

P = torch.tensor([[0.7, 0.2, 0.1]], dtype=torch.float64)
Q = torch.tensor([[0.2, 0.5, 0.3]], dtype=torch.float64)
KL = 0.7 * math.log(3.5) + 0.2 * math.log(0.4) + 0.1 * math.log(1 / 3)
ALPHA = 0.2 + 0.2 + 0.1


def random_case(n=6, V=11, seed=0):
    torch.manual_seed(seed)
    return torch.randn(n, V) * 2, (torch.randn(n, V) * 2).softmax(-1)


def top_k(p, k):
    values, ids = p.topk(k, dim=-1)
    return Teacher(ids, values)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("forward_kl", KL),
        ("total_variation", 1 - ALPHA),
        ("negative_log_acceptance", -math.log(ALPHA)),
        ("adaptive_kl_tv", math.exp(-3 * ALPHA) * KL + (1 - math.exp(-3 * ALPHA)) * (1 - ALPHA)),
    ],
)
def test_each_loss_equals_its_closed_form(name, value):
    assert plain(LOSSES[name], Q.log(), dense_teacher(P)).item() == pytest.approx(value, rel=1e-5)


def test_a_perfect_drafts_cross_entropy_is_the_teachers_entropy():
    """FAULTS 32, as KL = cross-entropy − entropy = 0, for full and truncated teachers; and no other draft reaches it."""
    other, p = random_case()
    for teacher in (dense_teacher(p), top_k(p, 4)):
        torch.testing.assert_close(plain(losses.forward_kl, p.log(), teacher), torch.zeros(6), atol=1e-6, rtol=0)
        assert bool((plain(losses.forward_kl, other, teacher) > 1e-2).all())
    q = other.softmax(-1)
    wanted = -(p * q.log()).sum(-1) + (p * p.log()).sum(-1)  # cross-entropy less entropy
    torch.testing.assert_close(plain(losses.forward_kl, other, dense_teacher(p)), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", sorted(LOSSES))
def test_a_teacher_of_all_tokens_in_any_order_equals_the_dense_one(name):
    logits, p = random_case()
    torch.testing.assert_close(plain(LOSSES[name], logits, top_k(p, 11)), plain(LOSSES[name], logits, dense_teacher(p)))


@pytest.mark.parametrize("k", [1, 4])
def test_truncated_kl_is_the_kl_of_the_listed_tokens_and_one_bucket(k):
    logits, p = random_case()
    q, ids = logits.softmax(-1), p.topk(k).indices
    p_k, q_k = p.gather(1, ids), q.gather(1, ids)
    p_b, q_b = torch.cat([p_k, 1 - p_k.sum(1, True)], 1), torch.cat([q_k, 1 - q_k.sum(1, True)], 1)
    torch.testing.assert_close(
        plain(losses.forward_kl, logits, top_k(p, k)), (p_b * (p_b / q_b).log()).sum(1), atol=1e-5, rtol=1e-4
    )


def test_the_gradient_of_truncated_kl_spreads_the_rest_as_the_drafts_own_tail():
    logits, p = random_case()
    logits.requires_grad_()
    plain(losses.forward_kl, logits, top_k(p, 3)).sum().backward()
    q = logits.detach().softmax(-1)
    ids = p.topk(3).indices
    tail = torch.ones_like(q).scatter(1, ids, 0.0) * q
    target = torch.zeros_like(q).scatter(1, ids, p.gather(1, ids)) + tail / tail.sum(1, True) * (
        1 - p.gather(1, ids).sum(1, True)
    )
    torch.testing.assert_close(logits.grad, q - target, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("k", [3, 11])
def test_gradients_match_finite_differences(name, k):
    logits, p = random_case(n=2)
    if name == "adaptive_kl_tv":
        weight = math.exp(-3 * float(plain(losses.acceptance, logits, top_k(p, k)).mean()))

        def f(z):
            return weight * plain(losses.forward_kl, z, top_k(p, k)) + (1 - weight) * plain(
                losses.total_variation, z, top_k(p, k)
            )
    else:

        def f(z):
            return plain(LOSSES[name], z, top_k(p, k))

    z = logits.clone().requires_grad_()
    plain(LOSSES[name], z, top_k(p, k)).sum().backward()
    step = 1e-2
    for i in range(11):
        e = torch.zeros(2, 11)
        e[:, i] = step
        difference = (f(logits + e) - f(logits - e)) / (2 * step)
        torch.testing.assert_close(z.grad[:, i], difference, atol=2e-3, rtol=2e-2)


def test_mass_that_the_draft_cannot_say_is_lost_acceptance_and_is_not_given_to_other_tokens():
    p = torch.tensor([[0.6, 0.3, 0.1]])
    teacher = Teacher(torch.tensor([[0, -1, 1]]), p)  # the draft has tokens 0 and 1; the target's second one is outside
    logits = torch.tensor([[0.8, 0.2]]).log()
    assert plain(losses.acceptance, logits, teacher).item() == pytest.approx(0.7)
    cost = 0.6 * math.log(0.6 / 0.8) + 0.1 * math.log(0.1 / 0.2)
    assert plain(losses.forward_kl, logits, teacher).item() == pytest.approx(cost)


def test_extreme_logits_give_finite_values_and_gradients():
    for name, loss in LOSSES.items():
        for k in (1, 3):
            logits = torch.tensor([[200.0, -200.0, 0.0], [0.0, 0.0, 0.0]], requires_grad=True)
            p = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
            value = plain(loss, logits, top_k(p, k))
            value.sum().backward()
            assert torch.isfinite(value).all(), name
            assert torch.isfinite(logits.grad).all(), name
