"""Head and loss fused, against the plain versions: value, acceptance and both gradients, for every loss and teacher."""

import functools

import pytest
import torch
from kit import TEACHERS, a_batch, a_teacher, objectives, tiny_target
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.models.vocabulary import DraftVocabulary
from draftsmith.train import fused, losses
from draftsmith.train.fused import head_loss, recomputed_loss
from draftsmith.train.losses import LOSSES, Loss, acceptance, forward_kl, plain
from draftsmith.train.teachers import LastTeacher, Teacher, dense_teacher

N, H, V = 23, 8, 40
RESTS = {
    f"{name}, tail": functools.partial(LOSSES[name], rest="tail")
    for name in ("total_variation", "negative_log_acceptance", "adaptive_kl_tv")
}
MIXTURE = Loss(((0.3, losses.jensen_shannon), (0.5, losses.cross_entropy), (1.0, RESTS["total_variation, tail"])))
ALL = LOSSES | RESTS | {"mixture": MIXTURE}


def case(teacher, seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    states, weight = torch.randn(N, H, dtype=dtype), torch.randn(V, H, dtype=dtype)
    p = (torch.randn(N, V, dtype=dtype) * 2).softmax(-1)
    return states, weight, a_teacher(teacher, p)


def both(states, weight, teacher, loss, temperature=1.0, weights=None, fused_version=head_loss):
    """(value, acceptance, gradients) of the plain and of the fused version."""
    results = []
    for use_fused in (False, True):
        s, w = states.clone().requires_grad_(), weight.clone().requires_grad_()
        if use_fused:
            value, accepted = fused_version(s, w, teacher, loss, temperature, weights)
        else:
            values = plain(loss, s @ w.mT, teacher[:], temperature)
            value = (values if weights is None else values * weights).sum()
            accepted = plain(acceptance, s @ w.mT, teacher[:])
        (2.0 * value).backward()
        results.append((value.detach(), accepted.detach(), s.grad, w.grad))
    return results


def recomputed(s, w, *rest):
    return recomputed_loss(s, lambda some: some @ w.mT, len(w), *rest)


def assert_equal(results, tolerance=1e-6):
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("teacher", TEACHERS)
@pytest.mark.parametrize("name", sorted(ALL))
def test_fused_equals_plain(name, teacher, monkeypatch):
    """FAULTS 67, with chunks of three rows against all at once: to 1e-6 (fp64: 1e-12) in values and gradients."""
    monkeypatch.setattr(fused, "CHUNK_NUMBERS", 3 * (V + 2))
    assert_equal(both(*case(teacher), ALL[name]), 1e-12)
    states, weight, taught = case(teacher, dtype=torch.float32)
    assert_equal(both(states, weight / 4, taught, ALL[name]), 5e-6 if "reverse" in name else 2e-6)


@pytest.mark.parametrize("version", [head_loss, recomputed])
@pytest.mark.parametrize("teacher", ["dense", "dense pruned", "top all"])
def test_fused_equals_plain_at_another_temperature_and_with_weights(version, teacher, monkeypatch):
    """The acceptance beside it stays that of temperature 1, unweighted."""
    monkeypatch.setattr(fused, "CHUNK_NUMBERS", 3 * (V + 2))
    weights = torch.rand(N, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for temperature in (0.7, 2.0):
        assert_equal(both(*case(teacher), MIXTURE, temperature, weights, version), 1e-12)


@pytest.mark.parametrize("teacher", ["top 5", "sampled unsayable"])
def test_a_recomputed_head_equals_plain(teacher, monkeypatch):
    monkeypatch.setattr(fused, "CHUNK_NUMBERS", 3 * V)
    assert_equal(both(*case(teacher), MIXTURE, fused_version=recomputed), 1e-12)


@pytest.mark.parametrize("size", [V, 25])
@pytest.mark.parametrize("name", ["forward_kl", "total_variation"])
def test_a_teacher_from_last_states_equals_the_dense_one_that_it_stands_for(name, size, monkeypatch):
    monkeypatch.setattr(fused, "CHUNK_NUMBERS", 3 * V)
    torch.manual_seed(0)
    last, head = torch.randn(N, 6), torch.randn(V, 6)
    vocabulary = DraftVocabulary(torch.randperm(V)[:size].sort().values, V)
    states, weight = torch.randn(N, H), torch.randn(size, H) / 4
    p = (last @ head.mT).softmax(-1)[:, vocabulary.target_ids]
    recomputed_teacher = LastTeacher(last, lambda some: some @ head.mT, vocabulary)
    (_, of_last), (of_dense, _) = (
        both(states, weight, teacher, LOSSES[name]) for teacher in (recomputed_teacher, dense_teacher(p))
    )
    assert_equal((of_dense, of_last), 2e-6)


def test_a_tail_without_any_probability_still_gets_its_gradient():
    """q(rest) underflows: ∂L/∂z of the tail is the teacher's rest spread over it, and nothing overflows."""
    states = torch.eye(3)[:1].requires_grad_()
    weight = torch.tensor([[300.0, 0, 0], [0.0, 0, 0], [0.0, 0, 0]], requires_grad=True)
    value, _ = head_loss(states, weight, Teacher(torch.tensor([[0]]), torch.tensor([[0.4]])), forward_kl)
    value.backward()
    torch.testing.assert_close(weight.grad[:, 0], torch.tensor([0.6, -0.3, -0.3]))


def test_no_position_gives_zero():
    states, weight = torch.zeros(0, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
    value, accepted = head_loss(
        states, weight, Teacher(torch.zeros(0, 3, dtype=torch.long), torch.zeros(0, 3)), forward_kl
    )
    value.backward()
    assert (value.item(), len(accepted)) == (0.0, 0)
    assert not weight.grad.any()


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors made inside that were alive at one time."""

    def __init__(self):
        super().__init__()
        self.alive, self.peak = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        given = {StorageWeakRef(a.untyped_storage()).cdata for a in args if isinstance(a, torch.Tensor)}
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if (made := StorageWeakRef(storage)).cdata not in given:  # neither a view of an input nor done in place
                    self.alive[made.cdata] = made, storage.nbytes()
        self.alive = {key: pair for key, pair in self.alive.items() if not pair[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return out


def peak_bytes(positions, vocabulary, version, teacher):
    """Peak of a forward and backward pass, inputs not counted, and the bytes of its gradients."""
    states, weight = torch.randn(positions, H, requires_grad=True), torch.randn(vocabulary, H, requires_grad=True)
    with LiveBytes() as live:
        version(states, weight, teacher, forward_kl, 1.0, None)[0].backward()
    return live.peak, 4 * (states.numel() + weight.numel())


def test_a_frozen_head_costs_no_gradient_of_its_own_and_the_states_get_the_same():
    states, weight, teacher = case("top 5")
    peaks, gradients = [], []
    for trained in (True, False):
        s, w = states.clone().requires_grad_(), weight.clone().requires_grad_(trained)
        with LiveBytes() as live:
            head_loss(s, w, teacher, forward_kl)[0].backward()
        peaks.append(live.peak)
        gradients.append(s.grad)
    assert torch.equal(*gradients)
    assert peaks[1] <= peaks[0] - weight.nbytes


@pytest.mark.parametrize("version", [head_loss, recomputed, "everything at once"])
@pytest.mark.parametrize("teacher", ["listed", "from last"])
def test_memory_is_bounded_by_the_chunk_and_not_by_positions(version, teacher, monkeypatch):
    """Peak ≤ twice the gradients of states and weight + 16 chunks of logits; without chunks the same measure is far above it."""
    torch.manual_seed(0)
    positions, vocabulary, chunk = 800, 400, 20 * 400
    if version == "everything at once":
        version, chunk = head_loss, positions * vocabulary
    monkeypatch.setattr(fused, "CHUNK_NUMBERS", chunk)
    if teacher == "listed":
        taught = Teacher(torch.zeros(positions, 1, dtype=torch.long), torch.full((positions, 1), 0.5))
    else:
        last, head = torch.randn(positions, H), torch.randn(vocabulary, H)
        taught = LastTeacher(last, lambda some: some @ head.mT, DraftVocabulary.all_of(vocabulary))
    peak, gradients = peak_bytes(positions, vocabulary, version, taught)
    bound = 2 * gradients + 16 * 4 * 20 * vocabulary
    assert bound < 0.5 * 4 * positions * vocabulary  # half of [N, V] would break it
    assert (peak <= bound) == (chunk < positions * vocabulary)


@pytest.mark.parametrize("which", ["draft LM", "EAGLE"])
def test_training_runs_under_bf16_autocast_and_stays_near_fp32(which):
    """What a machine with bf16 units does: the loss within 2 %, every gradient finite and pointing the same way."""
    target = tiny_target()
    batch = a_batch(target, [24, 16])
    objective = objectives(target)[0 if which == "draft LM" else 1]

    def run(enabled):
        objective.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = objective(batch).loss
        loss.backward()
        return float(loss.detach()), torch.cat([p.grad.flatten() for p in objective.parameters() if p.grad is not None])

    (exact, gradient), (rounded, other) = run(False), run(True)
    assert rounded == pytest.approx(exact, rel=0.02)
    assert torch.isfinite(other).all()
    assert torch.nn.functional.cosine_similarity(gradient, other, dim=0) > 0.99
