"""Measure what a draft is worth: decode held-out prompts with it, per domain and temperature, and compare with plain decoding.

Every greedy run is checked against plain greedy decoding token for token. Knows prompts and settings; the run folder's files are
somebody else's.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from draftsmith.errors import UserError
from draftsmith.eval.calibration import calibration, watched
from draftsmith.eval.decode import Decoded, Decoding, decode
from draftsmith.eval.depth_one import on_answers
from draftsmith.eval.drafters import Drafter, NoDraft
from draftsmith.eval.foreign import foreign_metrics
from draftsmith.eval.metrics import by_position, by_prompt_length, metrics
from draftsmith.eval.prompts import Prompt, Question, Writer, read_questions
from draftsmith.eval.replay import profile, record
from draftsmith.eval.sample import sample
from draftsmith.eval.sampling import Sampler
from draftsmith.eval.settings import EvalSettings
from draftsmith.eval.teacher_forced import Text, forced_metrics
from draftsmith.eval.timing import measured_speed
from draftsmith.eval.tree import Shape, as_shape, chain_shape, optimal_shape
from draftsmith.models.target import Target


@dataclass
class PlainRuns:
    """Plain greedy decoding of each domain's prompts, computed once for all drafts: per prompt the tokens of its answers."""

    tokens: dict[str, list[list[list[int]]]] = field(default_factory=dict)


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


def questions(target: Target, settings: EvalSettings) -> tuple[dict[str, list[Prompt]], list[str]]:
    """The prompts of the settings' file, and what is to be said of them. Raises UserError."""
    writer = Writer(target, settings.template)
    room = target.context - settings.max_new_tokens - settings.K
    found, too_long = read_questions(Path(settings.questions or "").expanduser(), settings, writer, room)
    remarks = [f"{too_long} prompts of more than {room} tokens were left out"] if too_long else []
    if writer.plain and any(isinstance(prompt, Question) for prompts in found.values() for prompt in prompts):
        remarks.append("note: conversations are joined as plain text, without a chat template")
    return found, remarks


def evaluate(
    target: Target,
    drafter: Drafter,
    prompts: Mapping[str, Sequence[Prompt]],
    settings: EvalSettings,
    plain: PlainRuns,
    on_progress: Callable[[int], None] = lambda prompts: None,
    texts: Sequence[Text] = (),
) -> list[dict[str, Any]]:
    """The `results` of docs/conventions.md for one draft: one entry per domain, temperature and way of drafting.

    `plain` is filled with the reference outputs on first use and shared between drafts. texts: held-out rows for what is measured
    by teacher forcing.
    """
    results, rounds, writer = [], settings.rounds(), Writer(target, settings.template)
    watch = watched(drafter)  # its thoughts cost time: it is not the one that is timed
    for domain, asked in prompts.items():
        hows = [
            decoding(chosen, temperature, shape_for(target, drafter, asked, chosen, temperature, writer))
            for temperature, chosen in rounds
        ]
        of_domain = [text for text in texts if text.domain == domain]
        forced = forced_metrics(target, drafter, of_domain, [how.sampler for how in hows], settings.K)
        for (temperature, chosen), how, on_text in zip(rounds, hows, forced, strict=True):
            decoded = play(target, watch, asked, settings, how, writer)
            traces = [[answer.trace for answer in answers] for answers in decoded]
            measured = metrics([[verify for trace in own for verify in trace] for own in traces], settings.K)
            entry: dict[str, Any] = {
                "domain": domain,
                "temperature": temperature,
                "K": settings.K,
                "tree": drafter.own_tree or settings.tree_name,
                "drafting": chosen.drafting,
                "prompts": len(asked),
                "answers": sum(map(len, decoded)),
                **measured,
                "foreign": foreign_metrics(traces, settings.K),
                "by_position": by_position(traces),
                "by_prompt_length": by_prompt_length(traces, [[len(a.prompt) for a in own] for own in decoded]),
                **{"alpha_teacher_forced": {}, "alpha_teacher_forced_by_depth": [], **on_text},
                **{name: {} for name in ("speedup", "draft_cost", "verify_cost", "speedup_predicted")},
            }
            if temperature == 0:
                if domain not in plain.tokens:
                    own = play(target, NoDraft(), asked, settings, decoding(settings, 0.0), writer)
                    plain.tokens[domain] = [[answer.tokens for answer in answers] for answers in own]
                entry["identical"] = identical(decoded, plain.tokens[domain])
                if settings.tree == "chain":  # in a tree one of several first tokens may stay
                    entry["depth_one"] = on_answers(target, drafter, in_order(decoded))
            if target.has_tokenizer:
                entry["sample"] = sample(decoded[0][0], target.tokenizer)
            if bins := calibration(watch, in_order(decoded)):
                entry["calibration"] = bins
            if settings.timed_prompts:
                tokens, verifies = (np.array(measured["per_prompt"][name]) for name in ("tokens", "verifies"))
                few = [writer.first(prompt) for prompt in asked[: settings.timed_prompts]]
                entry |= measured_speed(target, drafter, few, settings, how).metrics(tokens, verifies, settings.K)
            results.append(entry)
            on_progress(len(asked))
    return results


def decoding(settings: EvalSettings, temperature: float, shape: Shape | None = None) -> Decoding:
    """What the settings say of decoding at this temperature (without a shape: chains of K)."""
    sampler = Sampler(temperature, settings.top_k, settings.top_p, settings.drafting == "greedy")
    return Decoding(shape or chain_shape(settings.K), sampler, settings.max_new_tokens, settings.seed)


def shape_for(
    target: Target,
    drafter: Drafter,
    asked: Sequence[Prompt],
    settings: EvalSettings,
    temperature: float,
    writer: Writer,
) -> Shape:
    """The tree that the settings ask for; the optimal one is made for the acceptance on a quarter of these prompts."""
    if settings.tree == "chain" or drafter.own_tree:
        return chain_shape(settings.K, settings.min_confidence)
    if settings.tree != "optimal":
        return as_shape(settings.tree, settings.K, settings.tree_nodes, settings.tree_width)
    some, how = list(map(writer.first, asked[: -(-len(asked) // 4)])), decoding(settings, temperature)
    texts = decode_all(target, NoDraft(), some, settings, how)
    trace = record(target, drafter, texts, how.sampler, depth=settings.K, siblings=settings.tree_width)
    sampled = temperature > 0 and settings.drafting == "sampled"
    return optimal_shape(profile(trace, settings.tree_width, sampled), settings.tree_nodes)


def play(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    settings: EvalSettings,
    how: Decoding,
    writer: Writer,
) -> list[list[Decoded]]:
    """The answers to each prompt: one, or for a conversation one per turn, each turn asked after the answers before it.

    A turn for which the target's context has no room ends its conversation. A random stream is named by what is asked, so that an
    answer depends neither on the other prompts nor on their order.
    """
    room = target.context - settings.max_new_tokens - settings.K
    answers: list[list[Decoded]] = [[] for _ in prompts]
    asked = dict(enumerate(map(writer.first, prompts)))
    while asked:
        texts = list(asked.values())
        names = [xxhash.xxh3_64_intdigest(np.array(ids, dtype=np.int64).tobytes()) for ids in texts]
        for number, result in zip(asked, decode_all(target, drafter, texts, settings, how, names), strict=True):
            answers[number].append(result)
        following = {n: writer.following(prompts[n], [a.tokens for a in answers[n]], room) for n in asked}
        asked = {number: ids for number, ids in following.items() if ids is not None}
    return answers


def in_order(answers: Sequence[Sequence[Decoded]]) -> list[Decoded]:
    """The answers to prompts, as `play` decoded them: all first turns, then all second ones."""
    turns = zip_longest(*answers)
    return [answer for turn in turns for answer in turn if answer is not None]


def decode_all(
    target: Target,
    drafter: Drafter,
    texts: list[list[int]],
    settings: EvalSettings,
    how: Decoding,
    names: Sequence[int] | None = None,
) -> list[Decoded]:
    """Decode prompts in batches. Each one's random stream is its own, made from the seed and its name (default: its number)."""
    decoded: list[Decoded] = []
    names = range(len(texts)) if names is None else names
    for start in range(0, len(texts), settings.batch):
        part = slice(start, start + settings.batch)
        decoded += decode(target, drafter, texts[part], how, names=names[part])
    return decoded


def identical(decoded: Sequence[Sequence[Decoded]], plain: Sequence[Sequence[list[int]]]) -> list[int]:
    """[answers whose tokens are those of plain decoding, answers], of each prompt's answers. One that is missing is another one."""
    pairs = [pair for ours, own in zip(decoded, plain, strict=True) for pair in zip_longest(ours, own)]
    same = sum(ours is not None and ours.tokens == own for ours, own in pairs)
    return [same, len(pairs)]
