"""What every codec keeps of states and distributions, and what it refuses."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftsmith.data.batches import NO_MASS
from draftsmith.data.cache.codecs import DISTRIBUTION_CODECS, STATE_CODECS, kept_kl
from draftsmith.data.cache.rotation import rotate
from draftsmith.errors import UserError

CODECS = tuple(STATE_CODECS)
WIDTHS = (1, 2, 3, 16, 33, 64)
FEW = settings(max_examples=60, deadline=None, derandomize=True)


def relative_error(codec: str, states: torch.Tensor) -> float:
    """Of states [N, W], the worst."""
    kept = STATE_CODECS[codec].roundtrip(states[:, None])[:, 0]
    assert kept.dtype == torch.float32
    assert kept.shape == states.shape
    return float(((kept - states).double().norm(dim=-1) / states.double().norm(dim=-1)).max())


def bound(codec: str, width: int) -> float:
    """Of any state: half a step in the last place; int4's levels are for states of many entries, so it may lose more of few."""
    of_int8 = 0.5 / 127 * width**0.5 * 1.02  # half a step in each entry, steps of the largest / 127
    return {"fp32": 0.0, "bf16": 2**-8, "fp8": 2**-4, "int8": of_int8, "int4": 0.4}[codec]


@pytest.mark.parametrize("codec", CODECS)
@given(data=st.data())
@FEW
def test_any_state_comes_back_within_the_codecs_bound(codec: str, data: st.DataObject) -> None:
    width = data.draw(st.sampled_from(WIDTHS))
    entries = st.floats(-100, 100, width=32) | st.floats(-(2.0**100), 2.0**100, width=32) | st.just(0.0)
    states = torch.tensor([data.draw(st.lists(entries, min_size=width, max_size=width))])
    if float(states.double().norm()) > 1e-30:
        assert relative_error(codec, states) <= bound(codec, width) + 1e-6


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("width", [32, 33, 96, 256, 1024])
def test_ordinary_states_and_those_with_huge_entries_come_back_within_the_tolerance(codec: str, width: int) -> None:
    states = torch.randn(50, width, generator=torch.Generator().manual_seed(width))
    states[10:, 0] *= 1e4
    states[20:, 5] *= 1e3
    assert relative_error(codec, states) <= STATE_CODECS[codec].tolerance
    assert relative_error(codec, torch.full((1, width), -7.3)) <= STATE_CODECS[codec].tolerance


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("width", WIDTHS)
def test_zeros_stay_zeros_and_the_smallest_numbers_stay_finite(codec: str, width: int) -> None:
    tiny = torch.full((2, 1, width), 1e-44)
    tiny[1] = 0
    kept = STATE_CODECS[codec].roundtrip(tiny)
    assert bool((kept[1] == 0).all())
    assert float((kept[0] - tiny[0]).abs().max()) <= 1e-38


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_states_that_are_not_finite_are_refused(codec: str, value: float) -> None:
    states = torch.ones(3, 2, 8)
    states[1, 1, 4] = value
    with pytest.raises(UserError, match="states are not finite"):
        STATE_CODECS[codec].encode(states, STATE_CODECS[codec].rotation)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("width", WIDTHS)
def test_a_state_takes_the_bytes_that_are_promised(codec: str, width: int) -> None:
    parts = STATE_CODECS[codec].encode(torch.randn(5, 3, width), STATE_CODECS[codec].rotation)
    assert sorted(parts) == sorted(STATE_CODECS[codec].parts)
    assert sum(part.nbytes for part in parts.values()) == 15 * STATE_CODECS[codec].bytes_per_state(width)
    assert all(len(part) == 5 for part in parts.values())


def test_each_state_is_kept_alone_whatever_stands_beside_it() -> None:
    states = torch.randn(6, 3, 32, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-3, 1.0, 1e3])[:, None]
    for codec in STATE_CODECS.values():
        torch.testing.assert_close(
            codec.roundtrip(states)[4:5, 1:2], codec.roundtrip(states[4:5, 1:2]), rtol=1e-6, atol=0
        )


@pytest.mark.parametrize("width", [1, 2, 3, 32, 33, 96, 97, 256])
def test_rotation_is_orthogonal_and_its_own_for_each_seed(width: int) -> None:
    matrix = rotate(torch.eye(width), seed=0)
    torch.testing.assert_close(matrix @ matrix.mT, torch.eye(width), atol=1e-5, rtol=0)
    states = torch.randn(4, 3, width, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(rotate(states, 0), states @ matrix, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(rotate(rotate(states, 0), 0, back=True), states, atol=1e-5, rtol=1e-5)
    if width > 3:
        assert float((rotate(states, 1) - rotate(states, 0)).abs().max()) > 0.1


def test_rotation_saves_the_rest_of_a_state_from_its_outlier() -> None:
    states = torch.randn(20, 256, generator=torch.Generator().manual_seed(0))
    states[:, 7] = 100.0
    step = 100 / 127
    unturned = (states / step).round() * step - states
    turned = STATE_CODECS["int8"].roundtrip(states[:, None])[:, 0] - states
    assert float(turned.norm()) < 0.2 * float(unturned.norm())


def test_fp8_look_up_equals_the_librarys_conversion() -> None:
    states = torch.randn(200, 1, 64, generator=torch.Generator().manual_seed(0))
    parts = STATE_CODECS["fp8"].encode(states, None)
    plain = parts[""].to(torch.float32) * parts["scale"].to(torch.float32)[..., None]
    assert torch.equal(STATE_CODECS["fp8"].decode(parts, 64, None), plain)


def logits(rows: int = 40, vocabulary: int = 300, sharpness: float = 3.0, seed: int = 0) -> torch.Tensor:
    return sharpness * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


def encoded(codec: str, values: torch.Tensor, k: int, seed: int = 1) -> dict[str, torch.Tensor]:
    uniforms = torch.rand(len(values), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return DISTRIBUTION_CODECS[codec].encode(values, k, uniforms)


@pytest.mark.parametrize("codec", ["topk", "topk8", "sampled", "from_last"])
@pytest.mark.parametrize(("vocabulary", "k"), [(200, 1), (200, 64), (300, 64), (70_000, 64)])
def test_a_distribution_takes_the_bytes_that_are_promised(codec: str, vocabulary: int, k: int) -> None:
    parts = encoded(codec, logits(3, vocabulary), k)
    assert sorted(parts) == sorted(DISTRIBUTION_CODECS[codec].parts)
    assert sum(part.nbytes for part in parts.values()) == 3 * DISTRIBUTION_CODECS[codec].bytes_per_token(vocabulary, k)


@pytest.mark.parametrize("k", [1, 2, 64, 300])
@pytest.mark.parametrize("sharpness", [0.0, 1.0, 8.0, 60.0])
def test_bytes_for_log_probabilities_keep_ids_and_mass_and_lose_next_to_nothing(k: int, sharpness: float) -> None:
    values = logits(sharpness=sharpness)
    exact, parts = DISTRIBUTION_CODECS["topk"].decode(encoded("topk", values, k)), encoded("topk8", values, k)
    rebuilt = DISTRIBUTION_CODECS["topk8"].decode(parts)
    assert exact is not None
    assert rebuilt is not None
    assert torch.equal(exact[0], rebuilt[0])
    assert torch.equal(parts["mass"], exact[1].exp().sum(-1))
    torch.testing.assert_close(rebuilt[1].exp().sum(-1), parts["mass"], atol=1e-6, rtol=0)
    assert 0 <= float(kept_kl(exact[1], rebuilt[1]).max()) + 1e-6 < 5e-4


@pytest.mark.parametrize("codec", ["topk", "topk8", "sampled"])
def test_a_token_of_no_probability_is_no_fault_and_nan_is(codec: str) -> None:
    values = logits(vocabulary=64)
    values[:, 9] = -torch.inf
    arrays = DISTRIBUTION_CODECS[codec].decode(encoded(codec, values, 64))
    assert arrays is not None
    assert not bool(torch.isnan(arrays[1]).any())
    assert float(torch.where(arrays[0] == 9, arrays[1].exp(), 0.0).max()) < 1e-40
    for fault in (torch.nan, torch.inf):
        values[3, 5] = fault
        with pytest.raises(UserError, match="logits are not finite"):
            encoded(codec, values, 64)


@given(k=st.integers(1, 255), sharpness=st.sampled_from([0.0, 1.0, 5.0, 50.0]), seed=st.integers(0, 1000))
@FEW
def test_draws_are_the_true_log_probabilities_weighted_to_one(k: int, sharpness: float, seed: int) -> None:
    values = logits(8, sharpness=sharpness, seed=seed)
    p = values.double().softmax(-1)
    arrays = DISTRIBUTION_CODECS["sampled"].decode(encoded("sampled", values, k, seed))
    assert arrays is not None
    ids, log_probs, weights = arrays
    used = ids >= 0
    assert bool((weights[~used] == 0).all())
    assert bool((log_probs[~used] == NO_MASS).all())
    torch.testing.assert_close(weights.sum(-1), torch.ones(8), atol=1e-6, rtol=0)
    true = values.log_softmax(-1).gather(-1, ids.clamp_min(0))
    assert float((log_probs - true)[used].abs().max()) <= 2**-5  # half precision, of a log-probability down to −64
    dense = torch.zeros_like(p).scatter_add_(-1, ids.clamp_min(0), weights.double())
    assert float((dense - p).abs().max()) < 1 / k + 1e-6  # a token is met floor(k p) or ceil(k p) times
    for row in ids:
        assert len(set(row[row >= 0].tolist())) == int((row >= 0).sum())


def test_draws_are_unbiased_and_vary_less_than_independent_ones() -> None:
    """Over a fine grid of offsets the mean share of each token is its probability, up to the grid."""
    k, grid = 8, 2000
    values = logits(1, 40, sharpness=2.0).expand(grid, -1)
    parts = DISTRIBUTION_CODECS["sampled"].encode(values, k, (torch.arange(grid) + 0.5) / grid)
    arrays = DISTRIBUTION_CODECS["sampled"].decode(parts)
    assert arrays is not None
    ids, _, weights = arrays
    dense = torch.zeros(grid, 40, dtype=torch.float64).scatter_add_(-1, ids.clamp_min(0), weights.double())
    p = values[0].double().softmax(-1)
    assert float((dense.mean(0) - p).abs().max()) < 2 / (grid * k)
    assert bool((dense.var(0, correction=0) <= p * (1 - p) / k + 2 / (grid * k**2)).all())
    assert float(dense.var(0, correction=0).sum()) < 0.5 * float((p * (1 - p)).sum() / k)


def test_a_certain_token_may_take_all_draws() -> None:
    values = torch.full((1, 300), -50.0)
    values[0, 17] = 50.0
    arrays = DISTRIBUTION_CODECS["sampled"].decode(encoded("sampled", values, 255))
    assert arrays is not None
    assert arrays[0][0, 0] == 17
    assert arrays[2][0, 0] == 1.0


def test_mass_is_what_the_listed_tokens_cover() -> None:
    values = logits()
    for codec in ("topk", "topk8", "sampled"):
        parts = encoded(codec, values, 20)
        arrays = DISTRIBUTION_CODECS[codec].decode(parts)
        assert arrays is not None
        covered = torch.where(arrays[0] >= 0, values.softmax(-1).gather(-1, arrays[0].clamp_min(0)), 0.0).sum(-1)
        np.testing.assert_allclose(DISTRIBUTION_CODECS[codec].mass(parts), covered, atol=1e-3)
    assert float(DISTRIBUTION_CODECS["from_last"].mass({})) == 1.0
