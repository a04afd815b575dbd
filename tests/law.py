"""χ² of whole three-token continuations, decoded with a model of five tokens, against the law that the model itself gives them."""

import itertools

import numpy as np
import torch
from kit import tiny_model

from draftsmith.eval.decode import Decoding, decode
from draftsmith.models.target import Target

V, LENGTH, PROMPT = 5, 3, [1, 2, 1, 2, 4, 1]
FALSE_ALARM = 1e-6


def five_token_target(seed=0):
    return Target(tiny_model(seed=seed, vocabulary=V, pad_token_id=0))


def enumerated_law(target, sampler):
    """Probability of every continuation of `LENGTH` tokens, from the target alone."""
    texts = list(itertools.product(range(V), repeat=LENGTH))
    ids = torch.tensor([[*PROMPT, *text] for text in texts])
    with torch.no_grad():
        p = sampler.probabilities(target.forward(ids).logits)
    law = [np.prod([p[i, len(PROMPT) - 1 + t, token] for t, token in enumerate(text)]) for i, text in enumerate(texts)]
    return np.array(law)


def observed_counts(target, drafter, shape, sampler, draws, seed):
    out = decode(
        target,
        drafter,
        [PROMPT] * draws,
        Decoding(shape, sampler, max_new_tokens=LENGTH, seed=seed, eos_ids=frozenset()),
    )
    counts = np.zeros(V**LENGTH)
    for result in out:
        a, b, c = result.tokens
        counts[(a * V + b) * V + c] += 1
    return counts


def p_value(counts, law):
    """χ² test; outcomes expected less than five times share one cell. Impossible outcomes that occur give 0."""
    expected = law * counts.sum()
    if counts[expected == 0].any():
        return 0.0
    rare = expected < 5
    observed_cells = np.append(counts[~rare], counts[rare].sum())
    expected_cells = np.append(expected[~rare], expected[rare].sum())
    if expected_cells[-1] == 0:
        observed_cells, expected_cells = observed_cells[:-1], expected_cells[:-1]
    statistic = ((observed_cells - expected_cells) ** 2 / expected_cells).sum()
    freedom = max(len(observed_cells) - 1, 1)
    return float(torch.special.gammaincc(torch.tensor(freedom / 2.0), torch.tensor(statistic / 2.0)))
