"""What a draft is worth on given text: expected acceptance at every position and depth, without decoding.

Computed from the drafts' own `step`, apart from the drafters of `decode` and from the trainer, so that it can judge both. Knows
drafts and the target's whole distribution; nothing of files, caches or domains.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from draftsmith.eval.drafters import Drafter, EagleDrafter, LMDrafter, MedusaDrafter
from draftsmith.eval.metrics import ratio
from draftsmith.eval.sampling import Sampler
from draftsmith.eval.theory import expected_tokens
from draftsmith.models.eagle import EagleHead
from draftsmith.models.lm import LMOutput
from draftsmith.models.target import Target
from draftsmith.models.vocabulary import DraftVocabulary

AT_ONCE = 256  # positions whose distributions are held in float64 at the same time


class Text(Protocol):
    """A prepared row. token_ids: int [T]; supervised: bool [T], true where the predicted token counts."""

    @property
    def token_ids(self) -> np.ndarray: ...

    @property
    def supervised(self) -> np.ndarray: ...

    @property
    def domain(self) -> str: ...


def can_be_forced(drafter: Drafter) -> bool:
    """Whether the drafter is a model with a distribution after any text; prompt lookup is none."""
    return isinstance(drafter, LMDrafter | EagleDrafter | MedusaDrafter)


def forced_metrics(
    target: Target, drafter: Drafter, texts: Sequence[Text], samplers: Sequence[Sampler], K: int
) -> list[dict[str, Any]]:
    """Per sampler: alpha_teacher_forced (of the first drafted token), the same by depth, and the tokens per verify that their
    product predicts. Intervals are bootstraps over texts. Empty dictionaries without texts or for what cannot be forced."""
    if not texts or not can_be_forced(drafter):
        return [{} for _ in samplers]
    found = [acceptance_at(target, drafter, text.token_ids, text.supervised, samplers, K) for text in texts]
    accepted = np.array([np.nansum(row, axis=-1) for row in found])  # [texts, samplers, depths]
    counted = np.array([(~np.isnan(row)).sum(-1) for row in found], dtype=float)
    results = []
    for number in range(len(samplers)):
        depths = [ratio(accepted[:, number, k], counted[:, number, k]) for k in range(accepted.shape[2])]
        results.append(
            {"alpha_teacher_forced": depths[0], "alpha_teacher_forced_by_depth": depths} | _predicted(depths, K)
        )
    return results


def _predicted(depths: list[dict[str, Any]], K: int) -> dict[str, float]:
    values = [depth["value"] for depth in depths if depth]
    if not values:
        return {}
    if len(depths) == 1:  # a draft LM: on given text no depth differs from another
        return {"tokens_per_verify_forced": expected_tokens(min(1.0, values[0]), K)}
    return {"tokens_per_verify_forced": 1.0 + float(np.cumprod(values).sum())}


@torch.inference_mode()
def acceptance_at(
    target: Target,
    drafter: Drafter,
    token_ids: Sequence[int] | np.ndarray,
    wanted: np.ndarray,
    samplers: Sequence[Sampler],
    depths: int,
) -> np.ndarray:
    """[samplers, depths, T]: how likely the target is to accept what the draft proposes for token t at that depth, if all before
    it were the text's own: Σ_v min(p, q) over the target's whole distribution, p of the likeliest token where that is drafted, and
    at temperature 0 whether the likeliest tokens agree. NaN where `wanted` [T] is false or no draft begins.

    A draft LM has one depth only. The target's and the draft's rows that are no tokens are left out, as in decoding.
    """
    assert isinstance(drafter, LMDrafter | EagleDrafter | MedusaDrafter)
    ids = torch.as_tensor(np.asarray(token_ids), dtype=torch.long)
    own = target.forward(ids[None], drafter.taps, want_logits=False)
    found: list[np.ndarray] = []
    for first, states, head in _predictions(drafter, ids, own, depths):
        level = np.full((len(samplers), len(ids)), np.nan)
        places = [t for t in range(first, len(ids)) if wanted[t]]
        for start in range(0, len(places), AT_ONCE):
            part = torch.tensor(places[start : start + AT_ONCE])
            p = target.head(own.last[0, part - 1])
            p[..., target.usable :] = float("-inf")
            q = head(states[part - first])
            for number, sampler in enumerate(samplers):
                level[number, part.numpy()] = expected(p, q, drafter.vocabulary, sampler)
        found.append(level)
    return np.stack(found, axis=1)


def expected(p_logits: Tensor, q_logits: Tensor, vocabulary: DraftVocabulary, sampler: Sampler) -> np.ndarray:
    """[n]: probability of acceptance, for logits of the target [n, V] and of the draft [n, V_d]."""
    best = vocabulary.to_target(q_logits.argmax(-1))
    if sampler.greedy:
        return (best == p_logits.argmax(-1)).double().numpy()
    p = sampler.probabilities(p_logits)
    if sampler.deterministic:
        return p.gather(1, best[:, None])[:, 0].numpy()
    return torch.minimum(p[:, vocabulary.target_ids], sampler.probabilities(q_logits)).sum(-1).numpy()


def _predictions(drafter: Any, ids: Tensor, own: LMOutput, depths: int) -> Iterator[tuple[int, Tensor, Any]]:
    """Per depth: the first token that is predicted, the draft's states [T − first, …] of it and those after it, and the head."""
    if isinstance(drafter, LMDrafter):
        model = drafter.model

        def head(states: Tensor) -> Tensor:
            logits = model.head(states)
            logits[..., model.usable :] = float("-inf")
            return logits

        yield 1, model.forward(ids[None], want_logits=False).last[0, :-1], head
    elif isinstance(drafter, EagleDrafter):
        features = own.taps if drafter.taps else own.last
        assert features is not None
        for k, state in enumerate(eagle_rollout(drafter.head, ids, features, depths)):
            yield 2 + k, state[0, : max(len(ids) - 2 - k, 0)], drafter.head.logits
    else:
        for k in range(min(depths, drafter.head.config.heads)):
            states = drafter.head.state(own.last[0, : max(len(ids) - 2 - k, 0)], k)
            yield 2 + k, states, partial(drafter.head.logits, k=k)


def eagle_rollout(head: EagleHead, ids: Tensor, features: Tensor, depths: int) -> Iterator[Tensor]:
    """The head's states [1, T, H] of each depth k, all slots at once: slot t stands at position t + k, joins the text's token
    t + 1 + k and its own state of depth k − 1, and predicts token t + 2 + k (docs/conventions.md)."""
    slots, late = torch.arange(len(ids))[None], head.config.inputs == "unshifted"
    state, attend = head.fuse(features), _own_path()
    for k in range(depths):
        by = k if late else k + 1
        joined = F.pad(ids[by:], (0, min(by, len(ids))))  # slots without a token are read by none that has one
        state = head.step(joined[None], state, slots + k, attend)
        yield state


def _own_path() -> Any:
    """An `Attend` in which slot t sees the first depth's keys 0 … t and its own key of every later depth."""
    keys: dict[int, list[Tensor]] = {}
    values: dict[int, list[Tensor]] = {}

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys.setdefault(layer, []).append(key)
        values.setdefault(layer, []).append(value)
        slots = query.shape[2]
        own = torch.eye(slots, dtype=torch.bool)
        mask = torch.cat([torch.ones_like(own).tril(), *[own] * (len(keys[layer]) - 1)], dim=1)
        k, v = torch.cat(keys[layer], dim=2), torch.cat(values[layer], dim=2)
        return F.scaled_dot_product_attention(query, k, v, mask, enable_gqa=True)

    return attend
