"""Processed distributions and drawing from them."""

import numpy as np
import pytest
import torch

from draftsmith.errors import UserError
from draftsmith.eval.sampling import Sampler, draw, processed

LOGITS = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()


def test_temperature_sharpens_and_flattens():
    assert processed(LOGITS, 0.5)[0] == pytest.approx(0.25 / 0.365, abs=1e-6)
    assert processed(LOGITS, 1.0).tolist() == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=1e-6)


def test_top_k_keeps_the_k_likeliest():
    assert processed(LOGITS, 1.0, top_k=2).tolist() == pytest.approx([0.625, 0.375, 0, 0], abs=1e-6)


def test_top_p_keeps_the_smallest_set_that_reaches_the_mass():
    assert processed(LOGITS, 1.0, top_p=0.7).tolist() == pytest.approx([0.625, 0.375, 0, 0], abs=1e-6)
    assert processed(LOGITS, 1.0, top_p=0.4).tolist() == [1, 0, 0, 0]


def test_a_draw_never_returns_a_token_of_probability_zero():
    p = np.array([0.0, 0.5, 0.0, 0.5, 0.0])
    assert {draw(p, u) for u in (0.0, 0.25, 0.4999999, 0.5, 0.75, np.nextafter(1, 0))} == {1, 3}


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1.0}, {"temperature": 1.0, "top_k": 0}, {"temperature": 1.0, "top_p": 0.0}]
)
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(UserError):
        Sampler(**wrong)


@pytest.mark.parametrize("temperature", [1e-308, 1e-9, 1e-3])
def test_a_temperature_near_zero_is_greedy_and_never_garbage(temperature):
    assert processed(torch.tensor([3.0, 500.0, -2.0]), temperature).tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    "wrong", [{"repetition_penalty": float("nan")}, {"presence_penalty": float("inf")}, {"min_p": 2.0}]
)
def test_penalties_that_are_no_numbers_are_refused(wrong):
    with pytest.raises(UserError):
        Sampler(1.0, **wrong)
