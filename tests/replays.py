"""Small decodings that tests of replay and of the tuner share."""

import numpy as np
import torch
from kit import tiny_model

from draftsmith.eval.decode import decode
from draftsmith.eval.drafters import LMDrafter
from draftsmith.models.draft import DraftLM

TOKENS = 12


def near_copy(noise=0.03):
    """The target's weights with noise: a draft that is often right and often wrong."""
    model = tiny_model()
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    return LMDrafter(DraftLM(model))


def prompts(count=4, seed=0):
    rng = np.random.default_rng(seed)
    texts = [rng.integers(6, 100, int(n)).tolist() for n in rng.integers(2, 20, count - 2)]
    return [[7], [9, 8, 9, 8, 9, 8], *texts]


def run(target, drafter, shape, sampler, texts, seed=0, **more):
    more = {"max_new_tokens": TOKENS, "eos_ids": frozenset()} | more
    return decode(target, drafter, texts, shape=shape, sampler=sampler, seed=seed, **more)


def counts(results):
    return [len(r.trace) for r in results], [sum(v.accepted for v in r.trace) for r in results]
