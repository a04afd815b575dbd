"""Speculative decoding: draft, verify in one target forward, accept, go on.

`decode` is the whole algorithm, for any drafter, for a batch of prompts. Plain decoding is the same engine without drafts.
Knows nothing of files, domains or metrics; it records what `draftsmith.eval.metrics` needs.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.eval import rules
from draftsmith.eval.drafters import Committed, Drafter, EagleDrafter, LMDrafter, MedusaDrafter, NoDraft
from draftsmith.eval.sampling import Sampler
from draftsmith.eval.tree import Proposal, Shape, as_shape, depths_of
from draftsmith.models.draft import DraftLM
from draftsmith.models.eagle import KINDS, EagleHead
from draftsmith.models.heads import check_target, foreign_head, head_kind
from draftsmith.models.kv import KVCache
from draftsmith.models.lm import LanguageModel
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.target import Target


@dataclass(frozen=True)
class Verify:
    """One verify step of one prompt.

    drafted: tokens on the drafted path (the tree's depth); accepted: how many of them stayed; emitted: accepted + 1 unless cut by
    EOS or the length cap; overlaps: acceptance probability at each drafted position reached (see `rules.Accepted`); hits: whether
    each of these was accepted; ranks: of each accepted token among its siblings, the first drafted is 0. Positions beyond a cut
    are not reached.
    """

    drafted: int
    accepted: int
    emitted: int
    overlaps: tuple[float, ...]
    hits: tuple[bool, ...]
    ranks: tuple[int, ...] = ()


@dataclass
class Decoded:
    """tokens: the new ones. finish_reason: "stop" after an EOS token or a stop string (which are kept), "length" at the cap.
    lossless: false if an acceptance rule was used that changes what is emitted."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    finish_reason: str = ""
    trace: list[Verify] = field(default_factory=list)
    text: str = ""
    lossless: bool = True


@dataclass(frozen=True)
class Ends:
    """Where a text ends: after an EOS token or the token that completes a stop string ("stop"), or at the cap ("length")."""

    eos_ids: frozenset[int]
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    tokenizer: Any = None

    def __call__(self, tokens: list[int]) -> str:
        if tokens[-1] in self.eos_ids or (self.stop and self._has_stop_string(tokens)):
            return "stop"
        return "length" if len(tokens) == self.max_new_tokens else ""

    def _has_stop_string(self, tokens: list[int]) -> bool:
        # A token holds at least a byte and a character at most four, so a stop string ends within this many tokens.
        tail = tokens[-(4 * max(map(len, self.stop)) + 4) :]
        text = self.tokenizer.decode(tail)
        return any(string in text for string in self.stop)


@dataclass(frozen=True)
class Decoding:
    """How texts are decoded. shape: of what is drafted for each verify; sampler: p, and how drafts are drawn; a text ends after an
    EOS token (eos_ids, None: the target's), a stop string (kept), or `max_new_tokens`; seed: of the random streams."""

    shape: Shape
    sampler: Sampler
    max_new_tokens: int
    seed: int | None = 0
    eos_ids: frozenset[int] | None = None
    stop: str | Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UserError(f"max_new_tokens {self.max_new_tokens}: must be at least 1")
        if "" in self.stop_strings:
            raise UserError("stop: an empty string ends every text; leave it out")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def ends(self, target: Target) -> Ends:
        eos_ids, strings = target.eos_ids if self.eos_ids is None else self.eos_ids, self.stop_strings
        return Ends(eos_ids, self.max_new_tokens, strings, target.tokenizer if strings else None)


@torch.inference_mode()
def decode(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    how: Decoding,
    *,
    names: Sequence[int] | None = None,
    on_tokens: Callable[[int, list[int], int], None] | None = None,
) -> list[Decoded]:
    """Decode every prompt to its end.

    Each prompt's random stream is made from the seed and its name (default: its index), so that the result does not depend on
    how prompts are batched. `on_tokens(prompt, tokens, accepted)` is called after every verify with the new tokens, of which the
    first `accepted` were drafted. Raises UserError for an empty prompt or one that does not fit the target's context.
    """
    _check(target, prompts, how)
    sampler, ends = copy.copy(how.sampler), how.ends(target)
    results = [Decoded(list(prompt), lossless=sampler.lossless) for prompt in prompts]
    active = list(range(len(prompts)))
    sampler.start(how.seed, active if names is None else list(names))
    capacity = max(map(len, prompts)) + how.max_new_tokens + max(how.shape.run, drafter.most_nodes) + 1
    cache = target.new_cache(len(prompts), capacity)
    drafter.begin(len(prompts), capacity)
    # Prefill all but the last token of each prompt: that one is pending, and the first verify reads it.
    committed = _prefill(target, drafter, cache, [result.prompt for result in results])

    while active:
        # 1. Draft: a tree of tokens below the pending one, and the q that each was drawn from.
        tree = drafter.propose(committed, how.shape, sampler)

        # 2. Verify: the target reads the whole tree in one forward; p is its distribution after every node.
        out = target.forward(tree.tokens, drafter.taps, cache=cache, visible=tree.visible, depths=tree.depths)
        logits = target.only_tokens(out.logits)
        drafter.observe(logits)

        # 3. Accept the longest lossless path, and emit one more token: the residual's or the bonus.
        texts = [(results[row].prompt, results[row].tokens) for row in active]
        accepted = _accept(tree, sampler.penalised(logits, texts, tree), sampler)
        for index, row in enumerate(active):
            new = _emit(results[row], *tree.rows[index], accepted[index], ends)
            if on_tokens is not None:
                on_tokens(row, new, results[row].trace[-1].accepted)

        # 4. Keep the path's keys, values and states; drop those of all other nodes, and the rows that are done.
        paths = [row.path for row in accepted]
        cache.commit(paths)
        committed = Committed.along(paths, [results[row].prompt + results[row].tokens for row in active], out)
        going = [index for index, row in enumerate(active) if not results[row].finish_reason]
        if 0 < len(going) < len(active):
            keep = torch.tensor(going)
            cache.select(keep)
            drafter.keep(keep)
            committed = committed.select(keep)
            sampler.streams = [sampler.streams[index] for index in going]
        active = [active[index] for index in going]
    return results


def _check(target: Target, prompts: Sequence[Sequence[int]], how: Decoding) -> None:
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise UserError(f"prompt {index} is empty: it needs at least one token")
        if wrong := [token for token in prompt if not 0 <= token < target.vocabulary]:
            raise UserError(f"prompt {index} holds token {wrong[0]}; the target has 0 to {target.vocabulary - 1}")
        if len(prompt) + how.max_new_tokens + how.shape.depth > target.context:
            raise UserError(
                f"prompt {index} has {len(prompt)} tokens; with max_new_tokens {how.max_new_tokens} and {how.shape.depth} drafted "
                f"that exceeds the target's context of {target.context}"
            )


def _prefill(target: Target, drafter: Drafter, cache: KVCache, prompts: list[list[int]]) -> Committed:
    counts = torch.tensor([len(prompt) - 1 for prompt in prompts])
    width = int(counts.max())
    if width == 0:
        nothing = torch.zeros(len(prompts), 0, target.width, dtype=target.dtype)
        taps = nothing[:, :, None].expand(-1, -1, len(drafter.taps), -1) if drafter.taps else None
        return Committed(prompts, nothing, taps, counts)
    ids = torch.tensor([prompt[:-1] + [0] * (width - len(prompt) + 1) for prompt in prompts])
    out = target.forward(ids, drafter.taps, cache=cache, want_logits=False)
    cache.set_lengths(counts)
    return Committed(prompts, out.last, out.taps, counts)


def _accept(tree: Proposal, logits: Tensor, sampler: Sampler) -> list[rules.Accepted]:
    """Apply the acceptance rule to every row. logits: [B, n, V]."""
    if sampler.greedy:
        best = logits.argmax(-1).tolist()
        return [rules.greedy(*nodes, following) for nodes, following in zip(tree.rows, best, strict=True)]
    p = sampler.probabilities(logits).numpy()
    if sampler.typical is not None:
        rows = zip(tree.rows, p, sampler.streams, strict=True)
        return [rules.typical(*nodes, after, *sampler.typical, stream) for nodes, after, stream in rows]
    q = tree.q.numpy() if tree.q is not None else [None] * len(p)
    every = zip(tree.rows, p, q, sampler.streams, strict=True)
    return [rules.rejection(*nodes, after, before, stream) for nodes, after, before, stream in every]


def _emit(result: Decoded, tokens: list[int], parents: list[int], accepted: rules.Accepted, ends: Ends) -> list[int]:
    """Append a row's new tokens, cut where the text ends, and record the step."""
    new: list[int] = []
    for token in [*(tokens[node] for node in accepted.path[1:]), accepted.following]:
        new.append(token)
        result.tokens.append(token)
        result.finish_reason = ends(result.tokens)
        if result.finish_reason:
            break
    kept = min(len(accepted.path) - 1, len(new))
    hits = tuple(k < len(accepted.path) - 1 for k in range(len(accepted.overlaps)))[: len(new)]
    ranks = tuple(parents[:node].count(parents[node]) for node in accepted.path[1:])[:kept]
    depth = max(depths_of(parents))
    result.trace.append(Verify(depth, kept, len(new), tuple(accepted.overlaps[: len(new)]), hits, ranks))
    return new


def speculative_decode(
    target: Any,
    draft: Any,
    prompt: str | Sequence[int] | Sequence[dict[str, str]],
    K: int = 4,
    temperature: float = 0.0,
    max_new_tokens: int = 128,
    *,
    tree: Shape | str | Sequence[int] | None = None,
    seed: int | None = None,
    stop: str | Sequence[str] = (),
    on_tokens: Callable[[int, list[int], int], None] | None = None,
    **sampling: Any,
) -> Decoded:
    """Decode one prompt with a draft; the output follows the target's own distribution exactly.

    target: a `Target`, a `transformers` causal LM, or a path. draft: a `Drafter`, `DraftLM`, `EagleHead`, `MedusaHeads`,
    `transformers` causal LM, path of any of these, or None for plain decoding. prompt: text, token ids, or chat messages. tree:
    None for a chain of K, a "static" or "dynamic" tree of depth K, the parent of each node, or a shape. sampling: further fields
    of `Sampler` (top_k, top_p, min_p, repetition_penalty …). Raises UserError.
    """
    target = as_target(target)
    how = Decoding(as_shape(tree, K), Sampler(temperature, **sampling), max_new_tokens, seed, stop=stop)
    result = decode(target, as_drafter(draft, target), [prompt_ids(target, prompt)], how, on_tokens=on_tokens)[0]
    if target.has_tokenizer:
        result.text = target.tokenizer.decode(result.tokens)
    return result


def as_target(target: Any) -> Target:
    """A `Target` from one, from a `transformers` model, or from a path."""
    if isinstance(target, Target):
        return target
    return Target.load(target) if isinstance(target, str | Path) else Target(target)


def as_drafter(draft: Any, target: Target) -> Drafter:
    """A drafter from whatever can draft. Raises UserError for a path that holds neither a head nor a causal LM."""
    if draft is None:
        return NoDraft()
    if isinstance(draft, str | Path):
        folder = Path(draft)
        kind = head_kind(folder)
        if kind is None and (foreign := foreign_head(folder)):
            raise UserError(
                f"{folder}: a head in an engine's layout ({foreign}); `draftsmith import` makes it one of ours"
            )
        loads = MedusaHeads.load if kind == "medusa" else EagleHead.load if kind in KINDS else DraftLM.load
        draft = loads(folder, target)  # whatever else it is, loading it as a causal LM says what is wrong
    if isinstance(draft, EagleHead | MedusaHeads):
        check_target(draft.config, target, "the draft head")
        return EagleDrafter(draft) if isinstance(draft, EagleHead) else MedusaDrafter(draft)
    if isinstance(draft, Drafter):
        return draft
    model = draft if isinstance(draft, LanguageModel) else DraftLM(draft)
    model.usable = min(model.usable, target.usable)
    if model.vocabulary != target.vocabulary:
        raise UserError(
            f"the draft has {model.vocabulary} tokens, the target {target.vocabulary}: they must share a vocabulary"
        )
    return LMDrafter(model)


def prompt_ids(target: Target, prompt: str | Sequence[int] | Sequence[dict[str, str]]) -> list[int]:
    """Token ids of a prompt: text is tokenised as it stands, messages go through the chat template."""
    if isinstance(prompt, Mapping):  # what a tokenizer returns
        return [int(token) for token in cast(Mapping[str, Sequence[int]], prompt)["input_ids"]]
    if isinstance(prompt, str):
        return list(target.tokenizer(prompt)["input_ids"])
    if len(prompt) and isinstance(prompt[0], dict):
        return list(
            target.tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, return_dict=True)[
                "input_ids"
            ]
        )
    return [int(token) for token in cast(Sequence[int], prompt)]
