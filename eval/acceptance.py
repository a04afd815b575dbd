"""Measure what a draft is worth: decode held-out prompts with it, per domain and temperature, and compare with plain decoding.

Every greedy run is checked against plain greedy decoding token for token. Knows prompts and settings; the run folder's files are
somebody else's.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from draftsmith.errors import UserError
from draftsmith.eval.decode import Decoded, Decoding, decode
from draftsmith.eval.drafters import Drafter, NoDraft
from draftsmith.eval.metrics import metrics, ratio
from draftsmith.eval.profile import rank_profile
from draftsmith.eval.sampling import Sampler
from draftsmith.eval.settings import EvalSettings
from draftsmith.eval.tree import Shape, as_shape, chain_shape, optimal_shape
from draftsmith.models.target import Target


class Text(Protocol):
    """A prepared row, as far as a prompt is concerned. token_ids: int [T]; supervised: bool [T]."""

    @property
    def token_ids(self) -> np.ndarray: ...

    @property
    def supervised(self) -> np.ndarray: ...

    @property
    def domain(self) -> str: ...


@dataclass
class PlainRuns:
    """Plain greedy decoding of each domain's prompts, computed once for all drafts."""

    tokens: dict[str, list[list[int]]] = field(default_factory=dict)


def held_out_prompts(rows: Iterable[Text], settings: EvalSettings, context: int) -> dict[str, list[list[int]]]:
    """The first `prompts` usable held-out rows of each domain.

    A text's prompt is its first `prompt_tokens` tokens; a dialogue's is everything before its first answer. Raises UserError
    when a domain that the settings name has no rows.
    """
    room = context - settings.max_new_tokens - settings.K
    if settings.prompt_tokens > room:
        raise UserError(
            f"evaluation.prompt_tokens {settings.prompt_tokens}: with max_new_tokens and K at most {room} fit the target's "
            f"context of {context}"
        )
    found: dict[str, list[list[int]]] = {domain: [] for domain in settings.domains or ()}
    for row in rows:
        prompts = found.setdefault(row.domain, []) if settings.domains is None else found.get(row.domain)
        if prompts is None or len(prompts) == settings.prompts:
            continue
        # Slot 0 is never supervised; a text is supervised from slot 1 on, a dialogue from the first token of its answer.
        answer = int(np.argmax(row.supervised))
        end = settings.prompt_tokens if answer == 1 else answer
        if len(row.token_ids) > end and end <= room:
            prompts.append([int(token) for token in row.token_ids[:end]])
    if empty := [domain for domain, prompts in found.items() if not prompts]:
        raise UserError(f"evaluation.domains: no held-out row of {', '.join(empty)} is long enough for a prompt")
    return found


def evaluate(
    target: Target,
    drafter: Drafter,
    prompts: dict[str, list[list[int]]],
    settings: EvalSettings,
    plain: PlainRuns,
    on_progress: Callable[[int], None] = lambda prompts: None,
) -> list[dict[str, Any]]:
    """The `results` of docs/conventions.md for one draft: one entry per domain and temperature.

    `plain` is filled with the reference outputs on first use and shared between drafts.
    """
    results = []
    for domain, texts in prompts.items():
        for temperature in settings.temperatures:
            shape = shape_for(target, drafter, texts, settings, temperature)
            decoded = decode_all(target, drafter, texts, settings, temperature, shape)
            entry: dict[str, Any] = {
                "domain": domain,
                "temperature": temperature,
                "K": settings.K,
                "tree": drafter.own_tree or settings.tree_name,
                "drafting": "greedy" if temperature == 0 else settings.drafting,
                "prompts": len(texts),
                **metrics([result.trace for result in decoded], settings.K),
                "speedup": {},
            }
            if temperature == 0:
                entry["identical"] = [_identical(target, domain, texts, decoded, settings, plain), len(texts)]
            if settings.timed_prompts:
                timed = texts[: settings.timed_prompts]
                entry["speedup"] = measured_speedup(target, drafter, timed, settings, temperature, shape)
            results.append(entry)
            on_progress(len(texts))
    return results


def decoding(settings: EvalSettings, temperature: float, shape: Shape | None = None) -> Decoding:
    """What the settings say of decoding at this temperature (without a shape: chains of K)."""
    sampler = Sampler(temperature, settings.top_k, settings.top_p, settings.drafting == "greedy")
    return Decoding(shape or chain_shape(settings.K), sampler, settings.max_new_tokens, settings.seed)


def shape_for(
    target: Target, drafter: Drafter, texts: list[list[int]], settings: EvalSettings, temperature: float
) -> Shape:
    """The tree that the settings ask for; the optimal one is made for the acceptance on a quarter of these prompts."""
    if settings.tree == "chain" or drafter.own_tree:
        return chain_shape(settings.K, settings.min_confidence)
    if settings.tree != "optimal":
        return as_shape(settings.tree, settings.K, settings.tree_nodes, settings.tree_width)
    some, how = texts[: -(-len(texts) // 4)], decoding(settings, temperature)
    profile = rank_profile(target, drafter, some, how, settings.K, settings.tree_width)
    return optimal_shape(profile, settings.tree_nodes)


def decode_all(
    target: Target,
    drafter: Drafter,
    texts: list[list[int]],
    settings: EvalSettings,
    temperature: float,
    shape: Shape | None = None,
) -> list[Decoded]:
    """Decode all prompts of a domain in batches; each prompt's random stream is its own."""
    decoded: list[Decoded] = []
    for start in range(0, len(texts), settings.batch):
        names = range(start, min(start + settings.batch, len(texts)))
        decoded += decode(
            target,
            drafter,
            [texts[i] for i in names],
            decoding(settings, temperature, shape),
            names=names,
        )
    return decoded


def measured_speedup(
    target: Target,
    drafter: Drafter,
    texts: list[list[int]],
    settings: EvalSettings,
    temperature: float = 0.0,
    shape: Shape | None = None,
) -> dict[str, float | int]:
    """Wall-clock tokens/s, speculative ÷ plain, one prompt at a time, the two in turn in this process.

    The interval is that of the ratio of total times, bootstrapped over prompts.
    """
    seconds: dict[str, list[float]] = {"plain": [], "speculative": []}
    for text in texts:
        for name, used in (("plain", NoDraft()), ("speculative", drafter)):
            started = time.perf_counter()
            [result] = decode(
                target,
                used,
                [text],
                decoding(settings, temperature, shape),
            )
            seconds[name].append((time.perf_counter() - started) / len(result.tokens))
    return ratio(np.array(seconds["plain"]), np.array(seconds["speculative"])) | {"count": len(texts)}


def _identical(
    target: Target,
    domain: str,
    texts: list[list[int]],
    decoded: list[Decoded],
    settings: EvalSettings,
    plain: PlainRuns,
) -> int:
    if domain not in plain.tokens:
        plain.tokens[domain] = [r.tokens for r in decode_all(target, NoDraft(), texts, settings, 0.0)]
    return sum(a.tokens == b for a, b in zip(decoded, plain.tokens[domain], strict=True))
