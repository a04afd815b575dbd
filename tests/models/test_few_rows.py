"""Linear layers over few rows: another order of multiplication, the same model."""

import copy

import pytest
import torch
import torch.nn.functional as F
from kit import tiny_target
from torch import nn

from draftsmith.models import few_rows
from draftsmith.models.eagle import new_eagle_head
from draftsmith.models.few_rows import FEW, FewRowsLinear, few_rows_fast
from draftsmith.models.vocabulary import DraftVocabulary


@pytest.fixture(autouse=True)
def gaining(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "_gains", lambda: True)


@pytest.fixture
def layer() -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 16, bias=False))
    few_rows_fast(module)
    return module


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (2, 3), (1, 8), (3, 3), (0, 5)])
def test_values_and_gradients_are_those_of_a_linear_layer(layer: nn.Module, shape: tuple[int, int]) -> None:
    x = torch.randn(*shape, 24, requires_grad=True)
    wanted = F.linear(F.linear(x, layer[0].weight, layer[0].bias), layer[1].weight)
    weights = [x, *layer.parameters()]
    out = layer(x)
    assert out.shape == wanted.shape
    assert out.is_contiguous()
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(
        torch.autograd.grad(out.square().sum(), weights),
        torch.autograd.grad(wanted.square().sum(), weights),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", range(1, FEW + 3))
def test_only_few_rows_are_turned_round(layer: nn.Module, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    turned = []
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *given: turned.append(given) or mm(*given))
    layer(torch.randn(1, rows, 24))
    assert bool(turned) == (2 <= rows <= FEW)


def test_half_precision_goes_its_own_way_whatever_the_number_of_rows(layer: nn.Module) -> None:
    for rows in (1, 4, 12):
        x = torch.randn(1, rows, 24)
        wanted = F.linear(F.linear(x.bfloat16(), *weights(layer[0])), *weights(layer[1]))
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(layer(x), wanted)
    assert torch.equal(layer.bfloat16()(x.bfloat16()), wanted)


def weights(layer: nn.Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
    return layer.weight.bfloat16(), None if layer.bias is None else layer.bias.bfloat16()


def test_names_states_and_copies_stay(layer: nn.Module) -> None:
    assert list(layer.state_dict()) == ["0.weight", "0.bias", "1.weight"]
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other[0].weight.zero_()
    x = torch.randn(1, 3, 24)
    assert not torch.equal(layer(x), other(x))  # a copy multiplies with its own weights


def test_layers_that_are_more_than_linear_are_left_alone() -> None:
    class Adapted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 1

    class Packed(torch.Tensor):
        """A weight that only says it is float32, as quantised ones do."""

    packed = nn.Linear(4, 4)
    packed.weight = nn.Parameter(torch.randn(4, 4).as_subclass(Packed))
    module = nn.ModuleList([Adapted(4, 4), packed, nn.Linear(4, 4, dtype=torch.float64), nn.Linear(4, 4)])
    few_rows_fast(module)
    assert [type(layer) for layer in module] == [Adapted, nn.Linear, nn.Linear, FewRowsLinear]


def test_targets_and_heads_have_such_layers() -> None:
    target = tiny_target()
    head = new_eagle_head(target, (0, 1, 2), DraftVocabulary.all_of(target.vocabulary))
    for module in (target.model, head):
        layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
        assert layers
        assert {type(layer) for layer in layers} == {FewRowsLinear}


def test_nothing_changes_where_nothing_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "_gains", lambda: False)
    layer = nn.Linear(4, 4)
    few_rows_fast(layer)
    assert type(layer) is nn.Linear
