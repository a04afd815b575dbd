"""Losses against their closed forms, for full, truncated, pruned and sampled teachers, values and gradients."""

import functools
import itertools
import math

import pytest
import torch
from kit import TEACHERS, a_teacher
from pydantic import ValidationError

from draftsmith.errors import UserError
from draftsmith.train import losses
from draftsmith.train.losses import LOSSES, make_loss, match, plain
from draftsmith.train.settings import TrainSettings
from draftsmith.train.teachers import Teacher, dense_teacher

P, Q, TOKEN = (0.7, 0.2, 0.1), (0.2, 0.5, 0.3), 1


def overlap(p, q):
    return sum(map(min, p, q))


def kl(p, q):
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def skewed(beta):
    def value(p, q):
        m = [beta * a + (1 - beta) * b for a, b in zip(p, q, strict=True)]
        return (beta * kl(p, m) + (1 - beta) * kl(q, m)) / (beta * (1 - beta))

    return value


def adaptive(eta):
    def value(p, q):
        weight = math.exp(-eta * overlap(p, q))
        return weight * kl(p, q) + (1 - weight) * (1 - overlap(p, q))

    return value


CLOSED = {
    "forward_kl": (losses.forward_kl, kl),
    "reverse_kl": (losses.reverse_kl, lambda p, q: kl(q, p)),
    "jensen_shannon": (losses.jensen_shannon, skewed(0.5)),
    "jensen_shannon 0.1": (functools.partial(losses.jensen_shannon, beta=0.1), skewed(0.1)),
    "total_variation": (losses.total_variation, lambda p, q: sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2),
    "negative_log_acceptance": (losses.negative_log_acceptance, lambda p, q: -math.log(overlap(p, q))),
    "adaptive_kl_tv": (losses.adaptive_kl_tv, adaptive(3.0)),
    "adaptive_kl_tv 1": (functools.partial(losses.adaptive_kl_tv, eta=1.0), adaptive(1.0)),
    "cross_entropy": (losses.cross_entropy, lambda p, q: -math.log(q[TOKEN])),
    "top_k_cross_entropy 2": (
        functools.partial(losses.top_k_cross_entropy, top_k=2),
        lambda p, q: -sum(a * math.log(b) for a, b in sorted(zip(p, q, strict=True))[-2:]),
    ),
}
SUMS = ("forward_kl", "reverse_kl", "jensen_shannon", "jensen_shannon 0.1", "total_variation")  # over tokens
TAIL = {name: functools.partial(CLOSED[name][0], rest="tail") for name in ("total_variation", "adaptive_kl_tv")}
TAIL["negative_log_acceptance"] = functools.partial(losses.negative_log_acceptance, rest="tail")


def random_case(n=6, V=11, seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    return torch.randn(n, V, dtype=dtype) * 2, (torch.randn(n, V, dtype=dtype) * 2).softmax(-1)


def top_k(p, k):
    values, ids = p.topk(k, dim=-1)
    return Teacher(ids, values)


def close(a, b, tolerance=1e-9):
    torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("name", sorted(CLOSED))
def test_each_loss_equals_its_closed_form(name, temperature):
    """FAULTS 26."""
    divergence, closed = CLOSED[name]
    p, q = ([x ** (1 / temperature) for x in values] for values in (P, Q))
    p, q = [x / sum(p) for x in p], [x / sum(q) for x in q]
    teacher = Teacher(None, torch.tensor([P]), tokens=torch.tensor([TOKEN]))
    value = plain(divergence, torch.tensor([Q]).log() + 3.0, teacher, temperature)
    assert value.item() == pytest.approx(closed(p, q), rel=2e-6)


def test_a_perfect_drafts_cross_entropy_is_the_teachers_entropy():
    """FAULTS 32, as KL = cross-entropy − entropy = 0, for full and truncated teachers; and no other draft reaches it."""
    other, p = random_case()
    for teacher in (dense_teacher(p), top_k(p, 4)):
        for name in SUMS[:-1]:
            close(plain(CLOSED[name][0], p.log(), teacher), torch.zeros(6, dtype=p.dtype))
            assert bool((plain(CLOSED[name][0], other, teacher) > 1e-2).all())
    q = other.softmax(-1)
    wanted = -(p * q.log()).sum(-1) + (p * p.log()).sum(-1)  # cross-entropy less entropy
    close(plain(losses.forward_kl, other, dense_teacher(p)), wanted)


@pytest.mark.parametrize("name", sorted(CLOSED))
def test_a_teacher_of_all_tokens_in_any_order_equals_the_dense_one(name):
    logits, p = random_case()
    tokens = torch.arange(6)
    listed, dense = (Teacher(t.ids, t.p, None, tokens) for t in (top_k(p, 11), dense_teacher(p)))
    for temperature in (1.0, 1.7):
        close(*(plain(CLOSED[name][0], logits, teacher, temperature) for teacher in (listed, dense)))


@pytest.mark.parametrize("teacher", TEACHERS)
@pytest.mark.parametrize("name", sorted(CLOSED))
def test_gradients_match_finite_differences(name, teacher):
    """FAULTS 26, for every loss, teacher and view of the rest. λ of the adaptive loss is without gradient: it is held."""
    logits, p = random_case(n=3)
    taught = a_teacher(teacher, p)
    z = logits.requires_grad_()
    for divergence in (CLOSED[name][0], TAIL.get(name)):
        if divergence is None:
            continue
        if name.startswith("adaptive"):
            rest, eta = ("bucket", "tail")[divergence is TAIL.get(name)], 3.0 if name == "adaptive_kl_tv" else 1.0
            held = torch.exp(-eta * losses.acceptance(match(logits, taught), rest)).detach()

            def parts(m, held=held, rest=rest):
                return held * losses.forward_kl(m) + (1 - held) * losses.total_variation(m, rest)

            close(
                *(
                    torch.autograd.grad(plain(f, z, taught).square().sum(), z)[0]
                    for f in (divergence, parts)  # square: every position with its own factor
                )
            )
            divergence = parts
        assert torch.autograd.gradcheck(lambda z, f=divergence: plain(f, z, taught), (z,))


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("name", SUMS[:-1])
def test_bucket_is_the_divergence_over_the_listed_tokens_and_one_more_outcome(name, k):
    logits, p = random_case()
    q, ids = logits.softmax(-1), p.topk(k).indices
    p_k, q_k = p.gather(1, ids), q.gather(1, ids)
    p_b, q_b = torch.cat([p_k, 1 - p_k.sum(1, True)], 1), torch.cat([q_k, 1 - q_k.sum(1, True)], 1)
    wanted = [CLOSED[name][1](a, b) for a, b in zip(p_b.tolist(), q_b.tolist(), strict=True)]
    close(plain(CLOSED[name][0], logits, top_k(p, k)), torch.tensor(wanted, dtype=p.dtype))


@pytest.mark.parametrize("name", [*SUMS, "negative_log_acceptance", "adaptive_kl_tv"])
def test_tail_is_the_full_loss_with_the_rest_spread_as_the_drafts_own_tail(name):
    """Values and gradients, the spread held constant. For KL and JS this is the bucket as well: they have no other choice."""
    logits, p = random_case()
    ids = p.topk(3).indices
    q = logits.softmax(-1)
    outside = q.scatter(1, ids, 0.0)
    mass = 1 - p.gather(1, ids).sum(1, True)
    spread = outside / outside.sum(1, True) * mass + torch.zeros_like(q).scatter(1, ids, p.gather(1, ids))
    results = []
    for divergence, teacher in (
        (TAIL.get(name, CLOSED[name][0]), top_k(p, 3)),
        (CLOSED[name][0], dense_teacher(spread)),
    ):
        z = logits.clone().requires_grad_()
        value = plain(divergence, z, teacher)
        results.append((value.detach(), torch.autograd.grad(value.sum(), z)[0]))
    for listed, dense in zip(*results, strict=True):
        close(listed, dense)


def test_bucket_and_tail_bound_the_true_acceptance_from_below_and_above():
    logits, p = random_case(n=50)
    true = plain(losses.acceptance, logits, dense_teacher(p))
    low, high = (plain(functools.partial(losses.acceptance, rest=r), logits, top_k(p, 3)) for r in ("bucket", "tail"))
    assert bool((low < true).all())
    assert bool((true <= high + 1e-12).all())
    assert bool((true < high - 0.01).any())
    q, ids = logits.softmax(-1), p.topk(3).indices
    close(low, torch.minimum(p, q).gather(1, ids).sum(1))
    close(high - low, torch.minimum(1 - p.gather(1, ids).sum(1), 1 - q.gather(1, ids).sum(1)))


@pytest.mark.parametrize("teacher", TEACHERS)
@pytest.mark.parametrize(("end", "near", "divergence"), [(0.0, 1e-4, "forward_kl"), (1.0, 1 - 1e-4, "reverse_kl")])
def test_jensen_shannon_has_no_jump_at_its_ends(teacher, end, near, divergence):
    """FAULTS 26: in fp32, values (but for the lost mass, a constant) and gradients tend to those of the two KLs."""
    logits, p = random_case(dtype=torch.float32)
    logits, p = logits / 4, p.sqrt() / p.sqrt().sum(1, True)  # no large p / q, which slow the approach down
    taught = a_teacher(teacher, p)
    found = []
    for f in (
        CLOSED[divergence][0],
        functools.partial(losses.jensen_shannon, beta=end),
        functools.partial(losses.jensen_shannon, beta=near),
    ):
        z = logits.clone().requires_grad_()
        value = plain(f, z, taught)
        found.append((value.detach(), torch.autograd.grad(value.sum(), z)[0]))
    (value, gradient), at_end, (close_by, its_gradient) = found
    assert torch.equal(value, at_end[0])
    close(its_gradient, gradient, 5e-3)
    if "unsayable" not in teacher and "pruned" not in teacher:
        close(close_by, value, 5e-3)


@functools.cache
def outcomes(draws=2):
    """Every outcome of `draws` draws from P, as rows of a sampled teacher, and the probability of each."""
    drawn = list(itertools.product(range(3), repeat=draws))
    chance = torch.tensor([math.prod(P[v] for v in some) for some in drawn], dtype=torch.float64)
    ids = torch.full((len(drawn), draws), -1)
    p, weight = torch.zeros(len(drawn), draws, dtype=torch.float64), torch.zeros(len(drawn), draws, dtype=torch.float64)
    for row, some in enumerate(drawn):
        for column, v in enumerate(sorted(set(some))):
            ids[row, column], p[row, column], weight[row, column] = v, P[v], some.count(v) / draws
    return Teacher(ids, p, weight), chance


@pytest.mark.parametrize("name", SUMS)
def test_a_sampled_teacher_is_unbiased_in_value_and_gradient(name):
    """Over all 9 outcomes of two draws, each with its probability: the full teacher's value and gradient, exactly."""
    teacher, chance = outcomes()
    z = torch.tensor([Q], dtype=torch.float64).log().requires_grad_()
    found = (chance * plain(CLOSED[name][0], z.expand(len(chance), 3), teacher)).sum()
    exact = plain(CLOSED[name][0], z, dense_teacher(torch.tensor([P], dtype=torch.float64))).sum()
    close(found, exact)
    close(*(torch.autograd.grad(value, z)[0] for value in (found, exact)))


def test_minus_log_of_a_sampled_acceptance_is_too_large_on_average_as_its_docstring_says():
    teacher, chance = outcomes(4)
    logits = torch.tensor([Q], dtype=torch.float64).log().expand(len(chance), 3)
    found = plain(losses.acceptance, logits, teacher)
    mean = float((chance * found).sum())
    assert mean == pytest.approx(overlap(P, Q))
    bias = float((chance * plain(losses.negative_log_acceptance, logits, teacher)).sum()) + math.log(mean)
    assert bias == pytest.approx(float((chance * (found - mean) ** 2).sum()) / (2 * mean**2), rel=0.5)
    assert bias > 0.01


def test_mass_that_the_draft_cannot_say_is_lost_acceptance_and_is_not_given_to_other_tokens():
    """Target tokens 0.6, 0.3, 0.1; the draft has the first and the last. Listed, drawn and dense teachers alike."""
    p, logits = torch.tensor([[0.6, 0.3, 0.1]]), torch.tensor([[0.8, 0.2]]).log()
    listed = Teacher(torch.tensor([[0, -1, 1]]), p)
    cost = 0.6 * math.log(0.6 / 0.8) + 0.1 * math.log(0.1 / 0.2)
    for teacher in (listed, Teacher(listed.ids, p, p), Teacher(None, p[:, [0, 2, 1]])):
        assert plain(losses.acceptance, logits, teacher).item() == pytest.approx(0.7)
        assert plain(losses.total_variation, logits, teacher).item() == pytest.approx(0.3)
        assert plain(losses.negative_log_acceptance, logits, teacher).item() == pytest.approx(-math.log(0.7))
        assert plain(losses.forward_kl, logits, teacher).item() == pytest.approx(cost)
        reverse = 0.8 * math.log(0.8 / 0.6) + 0.2 * math.log(0.2 / 0.1)
        assert plain(losses.reverse_kl, logits, teacher).item() == pytest.approx(reverse)
    assert plain(losses.cross_entropy, logits, Teacher(None, p, tokens=torch.tensor([-1]))).item() == 0


def test_temperature_counts_tokens_outside_the_drafts_vocabulary_and_refuses_a_sampled_teacher():
    p, logits = torch.tensor([[0.6, 0.1, 0.3]]), torch.tensor([[0.8, 0.2]]).log()
    root_p, root_q = p.sqrt() / p.sqrt().sum(), torch.tensor([[0.8, 0.2]]).sqrt()
    wanted = torch.minimum(root_p[:, :2], root_q / root_q.sum()).sum()
    for teacher in (Teacher(None, p), Teacher(torch.tensor([[0, 1, -1]]), p)):
        close(plain(losses.acceptance, logits, teacher, 2.0).sum(), wanted, 1e-6)
    with pytest.raises(UserError, match="whole distribution"):
        plain(losses.acceptance, logits, Teacher(torch.tensor([[0, 1, -1]]), p, p), 2.0)


def test_extreme_logits_give_finite_values_and_gradients():
    for name, (divergence, _) in CLOSED.items():
        for k in (1, 3):
            for loss in {divergence, TAIL.get(name, divergence)}:
                logits = torch.tensor([[200.0, -200.0, 0.0], [0.0, 0.0, 0.0]], requires_grad=True)
                p = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
                listed = top_k(p, k)
                value = plain(loss, logits, Teacher(listed.ids, listed.p, tokens=torch.tensor([1, 2])))
                value.sum().backward()
                assert torch.isfinite(value).all(), name
                assert torch.isfinite(logits.grad).all(), name


def test_settings_make_the_loss_that_they_name():
    logits, p = random_case()
    teacher = top_k(p, 3)

    def value(**settings):
        return plain(make_loss(TrainSettings(**settings)), logits, teacher)

    mixed = 0.3 * value(loss="forward_kl") + 2 * value(loss="total_variation")
    close(value(loss={"forward_kl": 0.3, "total_variation": 2}), mixed)
    close(value(loss="jensen_shannon", beta=1), value(loss="reverse_kl"))
    close(value(loss="adaptive_kl_tv", eta=0), value(loss="forward_kl"))
    for changed, usual in (
        ({"loss": "jensen_shannon", "beta": 0.2}, {"loss": "jensen_shannon"}),
        ({"loss": "adaptive_kl_tv", "eta": 5}, {"loss": "adaptive_kl_tv"}),
        ({"loss": "total_variation", "rest": "tail"}, {"loss": "total_variation"}),
        ({"loss": "negative_log_acceptance", "rest": "tail"}, {"loss": "negative_log_acceptance"}),
        ({"loss": "adaptive_kl_tv", "rest": "tail"}, {"loss": "adaptive_kl_tv"}),
    ):
        assert not torch.allclose(value(**changed), value(**usual))
    assert make_loss(TrainSettings(temperature=2)).temperature == 2
    assert set(LOSSES) == {name.split()[0] for name in CLOSED}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "hinge"}, "forward_kl"),
        ({"loss": {"forward_kl": 0}}, "greater than 0"),
        ({"loss": {}}, "names no loss"),
        ({"beta": 0.1}, "beta: 0.1 changes nothing without jensen_shannon"),
        ({"loss": "jensen_shannon", "eta": 1}, "eta: 1.0 changes nothing without adaptive_kl_tv"),
        ({"rest": "tail"}, "rest: tail changes nothing without"),
        ({"temperature": 0}, "greater than 0"),
    ],
)
def test_settings_that_change_nothing_or_mean_nothing_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        TrainSettings(**settings)
