"""Linear layers over few rows: another order of multiplication, the same model."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kit import tiny_target
from torch import nn

from draftsmith.models import few_rows
from draftsmith.models.eagle import new_eagle_head
from draftsmith.models.few_rows import FEW, few_rows_fast
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


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (2, 3), (1, 8), (3, 3), (0, 5), (2, 0)])
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
    asked = []
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *given: asked.append(given) or mm(*given))
    layer(torch.randn(1, rows, 24))
    assert bool(asked) == (2 <= rows <= FEW)


def test_half_precision_goes_its_own_way_whatever_the_number_of_rows(layer: nn.Module) -> None:
    for rows in (1, 4, 12):
        x = torch.randn(1, rows, 24)
        wanted = F.linear(F.linear(x.bfloat16(), *weights(layer[0])), *weights(layer[1]))
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(layer(x), wanted)
    assert torch.equal(layer.bfloat16()(x.bfloat16()), wanted)


def weights(layer: nn.Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
    return layer.weight.bfloat16(), None if layer.bias is None else layer.bias.bfloat16()


def turned(module: nn.Module) -> list[bool]:
    return ["forward" in vars(layer) for layer in module.modules() if isinstance(layer, nn.Linear)]


def test_a_copy_multiplies_with_its_own_weights(layer: nn.Module) -> None:
    other, x = copy.deepcopy(layer), torch.randn(1, 3, 24)
    assert turned(other) == [True, True]
    with torch.no_grad():
        other[0].weight.zero_()
    torch.testing.assert_close(other(x), layer[1](layer[0].bias.expand(1, 3, -1)))
    assert not torch.allclose(layer(x), other(x))


def test_type_names_and_files_are_those_of_a_linear_layer(layer: nn.Module, tmp_path: Path) -> None:
    assert [type(one) for one in layer] == [nn.Linear, nn.Linear]
    assert list(layer.state_dict()) == ["0.weight", "0.bias", "1.weight"]
    torch.save(layer, tmp_path / "whole.pt")
    assert b"draftsmith" not in (tmp_path / "whole.pt").read_bytes()
    read = torch.load(tmp_path / "whole.pt", weights_only=False)
    x = torch.randn(1, 3, 24)
    torch.testing.assert_close(read(x), layer(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_trace_holds_for_other_numbers_of_rows(layer: nn.Module) -> None:
    traced = torch.jit.trace(layer, torch.randn(1, 3, 24))
    for rows in (1, 7, 30):
        x = torch.randn(2, rows, 24)
        torch.testing.assert_close(traced(x), layer(x))


def test_layers_that_are_more_than_linear_are_left_alone() -> None:
    class Adapted(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 1

    packed = nn.Linear(4, 4)
    packed.weight = nn.Parameter(torch.randn(4, 4).as_subclass(Packed))
    module = nn.ModuleList([Adapted(4, 4), packed, nn.Linear(4, 4, dtype=torch.float64), nn.Linear(4, 4)])
    few_rows_fast(module)
    assert turned(module) == [False, False, False, True]


class Packed(torch.Tensor):
    """A weight that only says it is float32, as quantised ones do: it can be asked for one kind of product."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.mm:
            raise NotImplementedError
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_weight_that_is_packed_later_is_asked_for_what_it_can_do(layer: nn.Module) -> None:
    layer[1].weight = nn.Parameter(layer[1].weight.detach().as_subclass(Packed), requires_grad=False)
    assert layer(torch.randn(1, 3, 24)).shape == (1, 3, 16)


def test_targets_and_heads_have_such_layers() -> None:
    target = tiny_target()
    head = new_eagle_head(target, (0, 1, 2), DraftVocabulary.all_of(target.vocabulary))
    for module in (target.model, head):
        assert turned(module)
        assert all(turned(module))


def test_nothing_changes_where_nothing_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "_gains", lambda: False)
    layer = nn.Linear(4, 4)
    few_rows_fast(layer)
    assert not any(turned(layer))
