"""Muon's direction, AdamW's equality with the library's, which parameter gets which rule, and the schedule."""

import copy

import pytest
import torch
from torch import nn

from draftsmith.train.optim import (
    MuonAdamW,
    compute_dtype,
    make_optimizer,
    orthogonalize,
    schedule,
    set_learning_rate,
    training_bytes,
)


class Toy(nn.Module):
    """An embedding, one hidden matrix, a norm with bias, a head of its own."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.header = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.lm_head = nn.Linear(8, 11, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.norm(self.header(self.embed(ids))))


def backward(module: Toy, seed: int) -> None:
    ids = torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(seed))
    module.zero_grad()
    nn.functional.cross_entropy(module(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()


def names(module: nn.Module, optimizer: MuonAdamW) -> dict[str, set[str]]:
    name_of = {id(parameter): name for name, parameter in module.named_parameters()}
    return {group["name"]: {name_of[id(p)] for p in group["params"]} for group in optimizer.param_groups}


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 24, 8), (2, 8, 24)])
def test_newton_schulz_keeps_singular_vectors_and_brings_singular_values_near_one(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    left, values, right = torch.linalg.svd(matrices, full_matrices=False)
    found = left.mT @ orthogonalize(matrices) @ right.mT
    kept = values > 0.1 * values.amax(-1, keepdim=True)
    diagonal = found.diagonal(dim1=-2, dim2=-1)
    assert ((diagonal[kept] > 0.6) & (diagonal[kept] < 1.3)).all()
    assert (found - torch.diag_embed(diagonal)).abs().max() < 0.02


def test_muon_direction_equals_the_librarys_but_for_its_bf16() -> None:
    weights = torch.randn(12, 8, generator=torch.Generator().manual_seed(1))
    ours, theirs = nn.Parameter(weights.clone()), nn.Parameter(weights.clone())
    mine = MuonAdamW([{"params": [ours], "rule": "muon", "lr": 0.1, "weight_decay": 0.2}])
    library = torch.optim.Muon([theirs], lr=0.1, weight_decay=0.2, momentum=0.95, ns_steps=3)
    for seed in range(3):
        gradient = torch.randn(12, 8, generator=torch.Generator().manual_seed(seed))
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        mine.step()
        library.step()
    assert (ours - weights).norm() > 0.1
    assert (ours - theirs).norm() < 0.03 * (ours - weights).norm()


def test_vectors_embeddings_and_heads_move_exactly_as_with_the_librarys_adamw() -> None:
    torch.manual_seed(0)
    module, twin = Toy(), Toy()
    twin.load_state_dict(module.state_dict())
    module.header.weight.requires_grad_(False)
    twin.header.weight.requires_grad_(False)
    mine = make_optimizer(module, matrix_lr=0.1, other_lr=1e-2)
    library = torch.optim.AdamW(
        [p for p in twin.parameters() if p.requires_grad], lr=1e-2, betas=(0.9, 0.95), weight_decay=0
    )
    for seed in range(4):
        backward(module, seed)
        backward(twin, seed)
        mine.step()
        library.step()
    for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_hidden_matrices_go_to_muon_and_a_name_that_merely_contains_head_is_no_head() -> None:
    module = Toy()
    assert names(module, make_optimizer(module, 0.1, 0.01)) == {
        "matrices": {"header.weight"},
        "heads": {"lm_head.weight"},
        "embeddings": {"embed.weight"},
        "vectors": {"header.bias", "norm.weight", "norm.bias"},
    }


def test_a_tied_head_is_one_embedding_parameter() -> None:
    module = Toy(tied=True)
    found = names(module, make_optimizer(module, 0.1, 0.01))
    assert found["embeddings"] == {"embed.weight"}
    assert "heads" not in found


def test_frozen_parameters_are_in_no_group_and_nothing_to_train_is_refused() -> None:
    module = Toy()
    module.embed.weight.requires_grad_(False)
    assert "embeddings" not in names(module, make_optimizer(module, 0.1, 0.01))
    with pytest.raises(ValueError, match="nothing to train"):
        make_optimizer(module.requires_grad_(False), 0.1, 0.01)


def test_weight_decay_spares_norms_and_biases() -> None:
    module = Toy()
    groups = {group["name"]: group for group in make_optimizer(module, 0.1, 0.01, weight_decay=0.3).param_groups}
    assert {name: group["weight_decay"] for name, group in groups.items()} == {
        "matrices": 0.3, "heads": 0.3, "embeddings": 0.3, "vectors": 0.0,
    }  # fmt: skip


def test_rates_follow_the_schedule_relative_to_each_groups_own() -> None:
    optimizer = make_optimizer(Toy(), matrix_lr=0.1, other_lr=0.01, embedding_lr=0.5)
    set_learning_rate(optimizer, 0.5)
    set_learning_rate(optimizer, 0.25)
    rates = {group["name"]: group["lr"] for group in optimizer.param_groups}
    assert rates == {"matrices": 0.025, "heads": 0.0025, "embeddings": 0.125, "vectors": 0.0025}


def test_resumed_from_state_dict_the_weights_are_bit_equal() -> None:
    torch.manual_seed(0)
    module = Toy()
    optimizer = make_optimizer(module, 0.05, 0.01, weight_decay=0.1)
    for seed in range(3):
        backward(module, seed)
        optimizer.step()
    resumed = Toy()
    resumed.load_state_dict(module.state_dict())
    again = make_optimizer(resumed, 1.0, 1.0)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # as from a file; the library shares tensors
    for seed in range(3, 6):
        for one, other in ((module, optimizer), (resumed, again)):
            backward(one, seed)
            other.step()
    for ours, theirs in zip(module.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_parameter_without_gradient_stays_as_it_is() -> None:
    module = Toy()
    before = {name: parameter.clone() for name, parameter in module.named_parameters()}
    optimizer = make_optimizer(module, 0.1, 0.01, weight_decay=0.5)
    optimizer.step()
    assert all(torch.equal(parameter, before[name]) for name, parameter in module.named_parameters())


def test_schedule_rises_to_one_and_falls_linearly_to_the_last_step() -> None:
    factors = [schedule(step, steps=10, warmup=4) for step in range(10)]
    assert factors == pytest.approx([0.25, 0.5, 0.75, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])
    assert schedule(0, steps=3, warmup=0) == 1.0


def test_compute_is_fp32_on_a_cpu_without_bf16_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "avx512_bf16": False}, raising=False)
    assert compute_dtype("cpu") is torch.float32
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True}, raising=False)
    assert compute_dtype("cpu") is torch.bfloat16


def test_memory_to_train_is_that_of_masters_gradients_and_the_moments_that_exist_after_a_step():
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16))
    optimizer = make_optimizer(model, 0.01, 0.01)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    held = [*model.parameters(), *(p.grad for p in model.parameters())]
    held += [
        value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value) and value.ndim
    ]
    assert training_bytes(model) == sum(tensor.numel() * tensor.element_size() for tensor in held)
