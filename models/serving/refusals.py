"""What a head has that an engine lacks: such an export is refused by name, because engines say nothing and accept less.

Knows traits of our drafts and engines; knows neither files nor names of tensors.
"""

from collections.abc import Mapping

from draftsmith.errors import UserError
from draftsmith.models.draft import DraftLM
from draftsmith.models.eagle import EagleHead
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.serving.layouts import ENGINES
from draftsmith.models.target import Target

WIDTH = "its attention joins an embedding of the head's own width, ours the target's"
#: trait -> engine -> why it cannot be served there. An engine that is not named serves it.
REFUSED: dict[str, Mapping[str, str]] = {
    "an EAGLE-1 head": {
        "trtllm": "its PyTorch backend loads no EAGLE-1 checkpoints; train kind eagle3",
        "speculators": "this layout is of EAGLE-3 heads; export to vllm",
    },
    "Medusa heads": {
        "sglang": "it has no Medusa; export to vllm, or train kind eagle3",
        "trtllm": "its PyTorch backend has no Medusa; export to vllm, or train kind eagle3",
        "speculators": "this layout is of EAGLE-3 heads; export to vllm",
    },
    "a draft LM": {"speculators": "this layout is of EAGLE-3 heads; export to vllm, which serves a draft LM as it is"},
    "an input that is not EAGLE's (inputs)": dict.fromkeys(
        ("vllm", "sglang", "trtllm", "speculators"),
        "its slots join the state with the next token; train with inputs shifted",
    ),
    "a bias in fc (fc_bias)": {
        "vllm": "it drops the bias without a word; train with fc_bias false",
        "trtllm": "its key for it, bias, gives the attention biases too; train with fc_bias false",
        "speculators": "vLLM drops the bias without a word; train with fc_bias false",
    },
    "a bias in an EAGLE-3 head's fc (fc_bias)": {
        "sglang": "its key for it, bias, gives the attention biases too; train with fc_bias false"
    },
    "a width other than its target's": dict.fromkeys(
        ("vllm", "sglang", "trtllm", "speculators"), f"{WIDTH}; train without width, or use it here"
    ),
    "one tap": dict.fromkeys(
        ("sglang", "trtllm"), "it leaves fc out when there is one fused state; train with two taps or more"
    ),
    "a tap at the target's last block": {
        "sglang": "its targets hand out no state behind the last block; train with other taps"
    },
    "a norm before the residual (norm_residual)": dict.fromkeys(
        ("sglang", "trtllm"), "it keeps the un-normed feature as the residual; export to vllm"
    ),
    "norms of the taps and of their concatenation": {"trtllm": "it computes only the first of the two"},
    "a draft vocabulary smaller than the target's, in Medusa heads": {
        "vllm": "it gives every head the target's whole vocabulary; train without draft_vocabulary"
    },
    "a target whose embeddings are scaled, under EAGLE-1": dict.fromkeys(
        ("vllm", "sglang"), "it joins the embedding's rows as they are stored; train kind eagle3, which norms them"
    ),
}


def traits(draft: EagleHead | MedusaHeads | DraftLM, target: Target) -> list[str]:
    """The entries of `REFUSED` that the draft is."""
    if isinstance(draft, DraftLM):
        return ["a draft LM"]
    if isinstance(draft, MedusaHeads):
        pruned = not draft.vocabulary.full
        return ["Medusa heads"] + ["a draft vocabulary smaller than the target's, in Medusa heads"] * pruned
    config, eagle1 = draft.config, draft.config.kind == "eagle1"
    held = {
        "an EAGLE-1 head": eagle1,
        "an input that is not EAGLE's (inputs)": config.inputs != "shifted",
        "a bias in fc (fc_bias)": config.fc_bias,
        "a bias in an EAGLE-3 head's fc (fc_bias)": config.fc_bias and not eagle1,
        "a width other than its target's": config.width != config.target_width,
        "one tap": not eagle1 and len(config.taps) == 1,
        "a tap at the target's last block": target.blocks - 1 in config.taps,
        "a norm before the residual (norm_residual)": config.norm_residual,
        "norms of the taps and of their concatenation": config.norm_joined and config.norm_taps,
        "a target whose embeddings are scaled, under EAGLE-1": eagle1 and not target.plain_embedding,
    }
    return [trait for trait, held_here in held.items() if held_here]


def refuse(draft: EagleHead | MedusaHeads | DraftLM, target: Target, fmt: str, name: str) -> None:
    """Raises UserError naming the first trait of the draft that the engine cannot serve, and the remedy."""
    for trait in traits(draft, target):
        if reason := REFUSED[trait].get(fmt):
            raise UserError(f"{name}: {ENGINES[fmt]} cannot serve {trait}: {reason}")
