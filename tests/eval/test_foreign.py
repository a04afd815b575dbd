"""Every foreign number on one hand-made trace, on which those that are often taken for one another differ.

K = 4. Prompt A is a conversation of two answers, the second cut by EOS at its third accepted token; prompt B drafts badly, and its
last verify has no draft. accepted, emitted, drafted:

    A, answer 1:  4, 5, 4    2, 3, 4          S = 7 verifies, D = 6 of them with a draft
    A, answer 2:  3, 3, 4 (cut)               N = 5 + 3 + 3 + 1 + 2 + 1 + 1 = 16
    B:            0, 1, 4    1, 2, 4          Σ a = 4 + 2 + 3 + 0 + 1 + 0 = 10
                  0, 1, 4    0, 1, 0          Σ d = 24
"""

import numpy as np
import pytest

from draftsmith.eval import foreign
from draftsmith.eval.decode import Verify
from draftsmith.eval.metrics import metrics

K = 4


def step(accepted, drafted=K):
    hits = (True,) * accepted + ((False,) if accepted < drafted else ())
    return Verify(drafted, accepted, accepted + 1, tuple(map(float, hits)), hits)


CUT = Verify(K, 3, 3, (1.0,) * 3, (True,) * 3)
ANSWERS = [[[step(4), step(2)], [CUT]], [[step(0), step(1), step(0), step(0, drafted=0)]]]
#: What each of the six chains would have met at all four depths: as far as they got, what the trace says.
MATCHES = np.array(
    [[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [1, 0, 1, 1], [0, 0, 0, 0]]
)  # fmt: skip


def test_numbers_that_count_the_bonus_once_per_emitted_answer():
    assert foreign.eagle_tau(ANSWERS) == 16 / 7
    assert foreign.sglang_spec_accept_length(ANSWERS) == 16 / 7
    assert foreign.deepspec_accept_len(ANSWERS) == 16 / 7
    flat = [[verify for trace in own for verify in trace] for own in ANSWERS]
    assert metrics(flat, K)["tokens_per_verify"]["value"] == 16 / 7


def test_numbers_that_count_a_bonus_that_was_cut_and_skip_verifies_without_a_draft():
    assert foreign.vllm_mean_acceptance_length(ANSWERS) == 1 + 10 / 6
    assert foreign.spec_bench_mean_accepted_tokens(ANSWERS) == 1 + 10 / 7
    assert foreign.lk_tau(ANSWERS, K) == 4 * 10 / 24 + 1


def test_rates_of_drafted_tokens():
    assert foreign.vllm_draft_acceptance_rate(ANSWERS) == 10 / 24
    assert foreign.sglang_spec_accept_rate(ANSWERS) == 10 / 24
    assert foreign.llama_cpp_acceptance(ANSWERS) == 10 / 24
    assert foreign.sglang_spec_accept_rate_of_length(16 / 7, K) == pytest.approx(9 / 28), "not 10 / 24"
    assert foreign.deepspec_verify_rate(ANSWERS) == 16 / (24 + 7)


def test_rates_by_position_are_conditional_or_not():
    """Position 3 is reached once: the cut answer ends before it."""
    assert foreign.eagle_alpha_script(ANSWERS, K) == ([4, 3, 2, 1], [6, 4, 3, 1])
    assert foreign.eagle_n_alpha(ANSWERS, K) == [4 / 6, 3 / 4, 2 / 3, 1.0]
    assert foreign.vllm_per_position_rate(ANSWERS, K) == [4 / 6, 3 / 6, 2 / 6, 1 / 6]


def test_means_over_turns_and_over_prompts_differ_from_each_other_and_from_the_mean_over_verifies():
    """ModelOpt: answers 1 + 6/2, 1 + 3/1, 1 + 1/4. HASS: prompts 1 + 9/3 and 1 + 1/4."""
    assert foreign.modelopt_ar(ANSWERS) == pytest.approx((4 + 4 + 1.25) / 3)
    assert foreign.hass_acceptance_length(ANSWERS) == pytest.approx((4 + 1.25) / 2)


def test_what_trainers_simulate_differs_by_more_than_a_whole_token():
    """Means by depth 4/6, 4/6, 4/6, 3/6; chains right up to depth k: 4, 3, 2, 1 of six."""
    a = 4 / 6
    assert foreign.simulated_acc_len(MATCHES) == pytest.approx(a + a**2 + a**3 + a**3 / 2)
    assert foreign.tau_sim(MATCHES) == pytest.approx(1 + 10 / 6)
    assert foreign.deepspec_tau(MATCHES) == pytest.approx(1 + 10 / 6)
    assert foreign.tau_sim(MATCHES) - foreign.simulated_acc_len(MATCHES) > 1.1
    full, conditional = foreign.speculators_accuracy(MATCHES)
    assert full == pytest.approx([4 / 6, 3 / 6, 2 / 6, 1 / 6])
    assert conditional == pytest.approx([4 / 6, 3 / 4, 2 / 3, 1 / 2]), "the cut answer's chain goes on here"


def test_a_product_of_means_is_less_than_a_mean_of_products():
    """Half of the contexts accept with .9, half with .5 at every depth."""
    overlaps = np.repeat([[0.9], [0.5]], K, axis=1)
    assert foreign.deepspec_tau(overlaps) == pytest.approx(1 + (0.9 + 0.81 + 0.729 + 0.6561 + 0.9375) / 2)
    assert 1 + foreign.simulated_acc_len(overlaps) == pytest.approx(1 + 0.7 + 0.49 + 0.343 + 0.2401)


def test_all_that_a_trace_determines_stands_in_the_results_under_its_owners_name():
    found = foreign.foreign_metrics(ANSWERS, K)
    assert found["vllm_mean_acceptance_length"] == foreign.vllm_mean_acceptance_length(ANSWERS)
    assert found["hass_acceptance_length"] == pytest.approx(2.625)
    assert len(found) == 14
    nothing = foreign.foreign_metrics([[[step(0, drafted=0)]]], K)
    assert nothing["vllm_draft_acceptance_rate"] is None
    assert nothing["vllm_per_position_rate"] == [None] * K
