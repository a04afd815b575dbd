"""Head and loss fused, against the plain versions: value, acceptance and both gradients, for every loss and teacher."""

import pytest
import torch
from kit import a_batch, objectives, tiny_target

from draftsmith.train import fused
from draftsmith.train.fused import head_loss
from draftsmith.train.losses import LOSSES, Teacher, acceptance, dense_teacher, forward_kl, plain

N, H, V = 23, 8, 40


def case(teacher, seed=0):
    torch.manual_seed(seed)
    states, weight = torch.randn(N, H), torch.randn(V, H)
    p = (torch.randn(N, V) * 2).softmax(-1)
    if teacher == "dense":
        return states, weight, dense_teacher(p)
    values, ids = p.topk(int(teacher.split()[0]), dim=-1)
    if teacher.endswith("unsayable"):
        ids = torch.where((ids % 3 == 0) | (torch.arange(N)[:, None] == 5), -1, ids)  # row 5: none of them
    return states, weight, Teacher(ids, values)


def both(states, weight, teacher, loss):
    """(value, acceptance, gradients) of the plain and of the fused version."""
    results = []
    for use_fused in (False, True):
        s, w = states.clone().requires_grad_(), weight.clone().requires_grad_()
        if use_fused:
            value, accepted = head_loss(s, w, teacher, loss)
        else:
            value, accepted = (plain(f, s @ w.mT, teacher).sum() for f in (loss, acceptance))
        (2.0 * value).backward()
        results.append((value.detach(), accepted.detach(), s.grad, w.grad))
    return results


@pytest.mark.parametrize("teacher", ["dense", "1", "5", "40", "9 unsayable"])
@pytest.mark.parametrize("name", sorted(LOSSES))
def test_fused_equals_plain(name, teacher):
    plain_results, fused_results = both(*case(teacher), LOSSES[name])
    for a, b in zip(plain_results, fused_results, strict=True):
        torch.testing.assert_close(b, a, atol=1e-5, rtol=1e-5)


def test_chunks_change_nothing(monkeypatch):
    arguments = case("5")
    [_, whole] = both(*arguments, forward_kl)
    monkeypatch.setattr(fused, "CHUNK_NUMBERS", 3 * V)
    [_, chunked] = both(*arguments, forward_kl)
    for a, b in zip(whole, chunked, strict=True):
        torch.testing.assert_close(b, a, atol=1e-5, rtol=1e-5)


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
    assert (value.item(), accepted.item()) == (0.0, 0.0)
    assert not weight.grad.any()


def test_memory_is_bounded_by_the_chunk_and_not_by_positions(monkeypatch):
    """The largest tensor that head_loss makes is the states' own gradient; [N, V] logits are never there."""
    monkeypatch.setattr(fused, "CHUNK_NUMBERS", 16 * V)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else [out]:
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel())
            return out

    states, weight = torch.randn(4000, H, requires_grad=True), torch.randn(V, H, requires_grad=True)
    teacher = Teacher(torch.zeros(4000, 1, dtype=torch.long), torch.full((4000, 1), 0.5))
    with Watch():
        value, _ = head_loss(states, weight, teacher, forward_kl)
        value.backward()
    assert largest <= 4000 * H  # the states' own gradient; [N, V] would be 160 000


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
