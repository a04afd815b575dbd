"""What other projects would print for our trace: one function for each of their numbers, with its formula and where it is from.

The glossary is docs/metrics.md. Symbols: over all verifies s, d_s tokens drafted, a_s accepted, e_s emitted; S verifies, D of them
with a draft; N = Σ e. A trace ends where its answer ends: tokens that were accepted behind an end of text are in none of the sums,
while some of these projects count them. Sources are the projects' published code and papers as of 2026. Knows traces only.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from draftsmith.eval.decode import Verify

#: For each prompt the traces of its answers; several for a conversation.
Answers = Sequence[Sequence[Sequence[Verify]]]


def foreign_metrics(answers: Answers, K: int) -> dict[str, Any]:
    """All numbers that a decoded trace determines, under names that say whose they are; None where nothing was counted."""
    found: dict[str, Any] = {
        "eagle_tau": eagle_tau(answers),
        "eagle_n_alpha": eagle_n_alpha(answers, K),
        "vllm_mean_acceptance_length": vllm_mean_acceptance_length(answers),
        "vllm_draft_acceptance_rate": vllm_draft_acceptance_rate(answers),
        "vllm_per_position_rate": vllm_per_position_rate(answers, K),
        "sglang_spec_accept_length": sglang_spec_accept_length(answers),
        "sglang_spec_accept_rate": sglang_spec_accept_rate(answers),
        "llama_cpp_acceptance": llama_cpp_acceptance(answers),
        "deepspec_accept_len": deepspec_accept_len(answers),
        "deepspec_verify_rate": deepspec_verify_rate(answers),
        "modelopt_ar": modelopt_ar(answers),
        "hass_acceptance_length": hass_acceptance_length(answers),
        "spec_bench_mean_accepted_tokens": spec_bench_mean_accepted_tokens(answers),
        "lk_tau": lk_tau(answers, K),
    }

    def known(value: float) -> float | None:
        return None if math.isnan(value) else value

    return {name: [known(v) for v in of] if isinstance(of, list) else known(of) for name, of in found.items()}


def _verifies(answers: Answers) -> list[Verify]:
    return [verify for own in answers for trace in own for verify in trace]


def _sum(answers: Answers, name: str) -> int:
    return sum(getattr(verify, name) for verify in _verifies(answers))


def _ratio(above: float, below: float) -> float:
    return above / below if below else float("nan")


def eagle_tau(answers: Answers) -> float:
    """τ = N / S, the bonus token counted, over all verifies of a data set (EAGLE-1, -2, -3 papers: "average acceptance length").

    Our tokens_per_verify. DFlash's τ and NeMo-RL's acceptance are this, too."""
    return _ratio(_sum(answers, "emitted"), len(_verifies(answers)))


def eagle_n_alpha(answers: Answers, K: int) -> list[float]:
    """n-α: P(token n + 1 accepted | tokens 1 … n accepted), of chains (EAGLE-1 and -3 papers). Our n_alpha."""
    accepted, reached = eagle_alpha_script(answers, K)
    return [_ratio(a, n) for a, n in zip(accepted, reached, strict=True)]


def eagle_alpha_script(answers: Answers, K: int) -> tuple[list[int], list[int]]:
    """(alpha, num): at each depth k of the accepted path how often the draft's likeliest token was the target's, and how often the
    path came so far (EAGLE's `gen_ea_alpha_*` scripts). Of greedy chains: there a hit is a match of the likeliest tokens."""
    steps = _verifies(answers)
    alpha = [sum(len(v.hits) > k and v.hits[k] for v in steps) for k in range(K)]
    return alpha, [sum(len(v.hits) > k for v in steps) for k in range(K)]


def vllm_mean_acceptance_length(answers: Answers) -> float:
    """1 + Σ a / D, D the number of drafts (vLLM, `vllm/v1/spec_decode/metrics.py`, "Mean acceptance length").

    A step that an end of text cuts counts its bonus token though none was emitted, and steps without a draft are left out: both
    make it longer than tokens_per_verify."""
    return 1 + _ratio(_sum(answers, "accepted"), _drafts(answers))


def vllm_draft_acceptance_rate(answers: Answers) -> float:
    """Σ a / Σ d (vLLM, "Avg Draft acceptance rate"). Our acceptance_rate."""
    return _ratio(_sum(answers, "accepted"), _sum(answers, "drafted"))


def vllm_per_position_rate(answers: Answers, K: int) -> list[float]:
    """Position i: drafts that had it accepted / D, unconditional (vLLM, "Per-position acceptance rate").

    Our survival where every verify has a draft; no n_alpha."""
    steps = _verifies(answers)
    return [_ratio(sum(v.accepted > k for v in steps), _drafts(answers)) for k in range(K)]


def _drafts(answers: Answers) -> int:
    return sum(verify.drafted > 0 for verify in _verifies(answers))


def sglang_spec_accept_length(answers: Answers) -> float:
    """Completion tokens / verify count, cumulative since the server started (SGLang, `spec_accept_length`). Tokens are counted
    after the answer was cut, so it is tokens_per_verify."""
    return eagle_tau(answers)


def sglang_spec_accept_rate(answers: Answers) -> float:
    """Σ a / Σ d (SGLang, `spec_accept_rate`)."""
    return vllm_draft_acceptance_rate(answers)


def sglang_spec_accept_rate_of_length(length: float, K: int) -> float:
    """(length − 1) / K, as SGLang's older benchmarks derive the rate from the length: off by the tokens that were cut."""
    return (length - 1) / K


def llama_cpp_acceptance(answers: Answers) -> float:
    """Accepted / drafted (llama.cpp, "accept" of `llama-speculative`)."""
    return vllm_draft_acceptance_rate(answers)


def deepspec_accept_len(answers: Answers) -> float:
    """N / S, a last step without a bonus counted as it is (DeepSpec, `base_evaluator.py`)."""
    return eagle_tau(answers)


def deepspec_verify_rate(answers: Answers) -> float:
    """Σ accept_len / (Σ proposals + cycles) = N / (Σ d + S): the share of verified tokens that were of use (DeepSpec)."""
    return _ratio(_sum(answers, "emitted"), _sum(answers, "drafted") + len(_verifies(answers)))


def modelopt_ar(answers: Answers) -> float:
    """Mean over answers (turns of a request) of 1 + Σ a / S (ModelOpt, "AR"): every answer weighs the same, however long."""
    turns = [trace for own in answers for trace in own]
    return float(np.mean([1 + _ratio(_sum([[trace]], "accepted"), len(trace)) for trace in turns]))


def hass_acceptance_length(answers: Answers) -> float:
    """Mean over samples of mean(a) + 1 (HASS): every prompt weighs the same; its turns are one list."""
    return float(np.mean([1 + _ratio(_sum([own], "accepted"), len(_verifies([own]))) for own in answers]))


def spec_bench_mean_accepted_tokens(answers: Answers) -> float:
    """Mean of a + 1 over all steps, plain decoding being 1 (Spec-Bench): lengths are kept as they were before a cut."""
    return 1 + _ratio(_sum(answers, "accepted"), len(_verifies(answers)))


def lk_tau(answers: Answers, K: int) -> float:
    """K · Σ a / Σ d + 1 (LK losses, arXiv 2602.23881). 1 + Σ a / S if all drafts have K tokens."""
    return K * vllm_draft_acceptance_rate(answers) + 1


# The numbers below are no decoder's: trainers compute them on given text, for chains that begin at every position. `matches` [n, K]
# is what a chain of K would meet there, all depths filled in whether or not the chain gets so far: 0 or 1 for greedy matches, or
# Σ_v min(p, q). A token that the draft cannot say is a 0.


def simulated_acc_len(matches: np.ndarray) -> float:
    """Σ_k Π_{i ≤ k} mean_i: a product of means, without bonus (SpecForge, TorchSpec, `simulated_acc_len`).

    Contexts that are easy stay easy, so the mean of products is larger; with the bonus it lacks, a real decoder shows a good token
    more. Our held_out_run_length."""
    return float(np.cumprod(matches.mean(0)).sum())


def tau_sim(matches: np.ndarray) -> float:
    """1 + Σ_k mean(Π_{i ≤ k} match_i): joint survival; a token outside the draft's vocabulary ends the chain (Automodel)."""
    return 1 + float(np.cumprod(matches, axis=1).mean(0).sum())


def deepspec_tau(matches: np.ndarray) -> float:
    """1 + mean over positions of Σ_k Π_{i ≤ k} (DeepSpec): τ_greedy of greedy matches, τ_probabilistic of 1 − ½ ‖p − q‖₁, which is
    Σ_v min(p, q)."""
    return 1 + float(np.cumprod(matches, axis=1).sum(1).mean())


def speculators_accuracy(matches: np.ndarray) -> tuple[list[float], list[float]]:
    """(full_acc, cond_acc) of each rollout step (speculators, `eagle3/metrics.py`): the share of all positions whose chain is right
    up to this step, and the same among those that were right up to the one before. Our survival and n_alpha, on given text."""
    right = np.cumprod(matches, axis=1).mean(0)
    return right.tolist(), [_ratio(k, before) for k, before in zip(right, [1.0, *right[:-1]], strict=True)]
