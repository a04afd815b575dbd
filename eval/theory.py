"""The textbook arithmetic of a drafted chain: what an acceptance α, K drafted tokens and their cost predict.

Knows numbers only: no model, no file. Every formula assumes that each drafted token is accepted independently with the
same probability α (Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding", sections 3.1 and
3.3). Real drafts get worse with depth, so these predictions stand *beside* the measured numbers and never replace them.
"""

import math


def expected_tokens(alpha: float, K: int) -> float:
    """Tokens emitted per verify when K tokens are drafted: (1 − α^{K+1}) / (1 − α), and K + 1 in the limit α = 1.

    This is 1 + α + … + α^K: the bonus token, plus every drafted token times the probability that it and all before it
    are accepted (equation 1 of the paper). K = 0 is plain decoding. Raises ValueError outside 0 ≤ α ≤ 1, K ≥ 0.
    """
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"alpha is a probability, got {alpha}")
    if K < 0:
        raise ValueError(f"K is a number of tokens, got {K}")
    # The sum instead of the quotient: no cancellation near α = 1, and α = 1 needs no case of its own.
    return math.fsum(alpha**k for k in range(K + 1))


def speedup(alpha: float, K: int, c: float, verify_cost: float = 1.0) -> float:
    """Predicted speed over plain decoding: expected tokens / (verify_cost + K·c).

    `c` is the time of one draft step and `verify_cost` that of one verify of K + 1 tokens, both in plain target steps.
    The paper (theorem 3.8) takes verify_cost = 1, which holds while the target is bound by memory bandwidth.
    Raises ValueError for a cost that no machine has.
    """
    if c < 0.0 or verify_cost <= 0.0:
        raise ValueError(
            f"a draft step costs at least 0 and a verify more than 0, got c = {c}, verify_cost = {verify_cost}"
        )
    return expected_tokens(alpha, K) / (verify_cost + K * c)


def optimal_length(alpha: float, c: float, verify_cost: float = 1.0, most: int = 64) -> int:
    """The K in 0…`most` with the highest predicted speed-up; the smallest of equals. 0 says: do not draft at all."""
    return max(range(most + 1), key=lambda K: (speedup(alpha, K, c, verify_cost if K else 1.0), -K))
