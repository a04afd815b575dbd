"""What a head is worth to our decoder: per prompt, the tokens emitted and the verifies that it took. Knows no recipe."""

from collections.abc import Sequence
from typing import Any

from draftsmith.data.rows import Row
from draftsmith.eval.acceptance import held_out_prompts
from draftsmith.eval.decode import Decoding, decode
from draftsmith.eval.drafters import EagleDrafter, NoDraft
from draftsmith.eval.sampling import Sampler
from draftsmith.eval.settings import EvalSettings
from draftsmith.eval.tree import Dynamic, Shape, chain_shape, optimal_shape
from draftsmith.models.eagle import EagleHead
from draftsmith.models.target import Target

DOMAINS = ("code", "prose", "chat")
K, TREE, DEPTH, WIDTH, BATCH = 5, 32, 6, 8, 16
#: A token of rank r with the draft is taken to be accepted with 0.5 · 0.4^r: one static tree for all heads, made for none of them.
PROFILE = [[0.5 * 0.4**rank for rank in range(WIDTH)] for _ in range(DEPTH)]
#: what is decoded: (tree, temperature) → shape. At T = 1 the siblings of the static tree are sampled without replacement.
SHAPES: dict[tuple[str, float], Shape] = {
    ("chain", 0.0): chain_shape(K),
    ("chain", 1.0): chain_shape(K),
    ("tree", 0.0): Dynamic(WIDTH, DEPTH, TREE),
    ("tree", 1.0): optimal_shape(PROFILE, TREE),
}
CHAINS = tuple(what for what in SHAPES if what[0] == "chain")


def setting_name(tree: str, temperature: float) -> str:
    return f"{tree} T={temperature:g}"


def prompts_of(rows: Sequence[Row], target: Target, count: int, new_tokens: int) -> list[list[int]]:
    """`count` prompts of each domain's rows."""
    settings = EvalSettings(domains=DOMAINS, prompts=count, max_new_tokens=new_tokens, K=DEPTH)
    found = held_out_prompts(rows, settings, target.context)
    return [prompt for domain in DOMAINS for prompt in found[domain]]


def plain_texts(target: Target, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """Plain greedy decoding: what every head must reproduce at T = 0."""
    return [tokens for tokens, _ in _decoded(target, NoDraft(), prompts, "chain", 0.0, new_tokens, 0)]


def measured(
    target: Target,
    head: EagleHead,
    prompts: list[list[int]],
    plain: list[list[int]],
    what: Sequence[tuple[str, float]],
    new_tokens: int,
    seed: int,
) -> dict[str, list[list[int]]]:
    """Per setting, for each prompt [tokens emitted, verifies]. Raises RuntimeError where greedy text is not plain decoding's."""
    found = {}
    for tree, temperature in what:
        decoded = _decoded(target, EagleDrafter(head), prompts, tree, temperature, new_tokens, seed)
        if temperature == 0.0 and [tokens for tokens, _ in decoded] != plain:
            raise RuntimeError(f"{tree}: greedy speculative decoding gave another text than plain greedy decoding")
        found[setting_name(tree, temperature)] = [[len(tokens), verifies] for tokens, verifies in decoded]
    return found


def _decoded(
    target: Target, drafter: Any, prompts: list[list[int]], tree: str, temperature: float, new_tokens: int, seed: int
) -> list[tuple[list[int], int]]:
    results = []
    for start in range(0, len(prompts), BATCH):
        names = range(start, min(start + BATCH, len(prompts)))
        results += decode(
            target,
            drafter,
            [prompts[i] for i in names],
            Decoding(
                shape=SHAPES[tree, temperature], sampler=Sampler(temperature), max_new_tokens=new_tokens, seed=seed
            ),
            names=names,
        )
    return [(result.tokens, len(result.trace)) for result in results]
