"""The draft LM: any small causal LM that speaks the target's tokens; cut out of the target, or built from scratch.

Saved as an ordinary `transformers` folder, tokenizer included, so that every engine can serve it. Knows nothing of training.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM

from draftsmith.errors import UserError
from draftsmith.models.lm import LanguageModel
from draftsmith.models.target import Target, load_model


class DraftLM(LanguageModel):
    """The small model q."""

    @classmethod
    def from_target_blocks(cls, target: Target, blocks: Sequence[int]) -> "DraftLM":
        """The target with only these of its blocks, in this order; embedding, final norm and head are copies.

        Raises UserError for blocks that the target does not have.
        """
        if not blocks or any(not 0 <= i < target.blocks for i in blocks):
            raise UserError(
                f"distill.blocks: {list(blocks)} must name blocks from 0 to {target.blocks - 1} of the target"
            )
        model = _build(target, {"num_hidden_layers": len(blocks)}, blocks)
        source = target.model.state_dict()
        number = dict(enumerate(blocks))
        state = {name: source[_renumber(name, number)].clone() for name in model.state_dict()}
        model.load_state_dict(state)
        return cls(model)

    @classmethod
    def from_scratch(cls, target: Target, shape: dict[str, int], seed: int) -> "DraftLM":
        """A fresh model of the target's architecture with some sizes changed (`transformers` config names)."""
        known = target.config.to_dict()
        if wrong := [name for name in shape if name not in known or name == "vocab_size"]:
            raise UserError(
                f"distill.shape: {wrong[0]} is no size of a {target.config.model_type} draft that can be chosen"
            )
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return cls(_build(target, shape, None))

    @classmethod
    def load(cls, folder: Path, target: Target) -> "DraftLM":
        """Read a draft from its folder. Raises UserError when its vocabulary is not the target's."""
        draft = cls(load_model(str(folder), str(target.dtype).removeprefix("torch.")).to(target.device))
        if draft.vocabulary != target.vocabulary:
            raise UserError(f"{folder}: the draft has {draft.vocabulary} tokens, the target {target.vocabulary}")
        return draft

    def save(self, folder: Path, target: Target) -> None:
        """Write weights, configuration and the target's tokenizer as a `transformers` folder."""
        self.model.save_pretrained(folder)
        target.tokenizer.save_pretrained(folder)


def _build(target: Target, changes: dict[str, int], blocks: Sequence[int] | None) -> Any:
    values: dict[str, Any] = {**target.config.to_dict(), **changes}
    if kinds := getattr(target.config, "layer_types", None):
        count = values["num_hidden_layers"]
        values["layer_types"] = [kinds[i] for i in (range(count) if blocks is None else blocks)]
    try:
        config = type(target.config).from_dict(values)
        return AutoModelForCausalLM.from_config(config).to(target.device).eval()
    except (ValueError, RuntimeError, ZeroDivisionError, IndexError, StrictDataclassError) as error:
        raise UserError(f"distill.shape: {changes} is not a possible shape ({str(error).splitlines()[0]})") from error


def _renumber(name: str, number: dict[int, int]) -> str:
    """The target's name of a draft's tensor: `model.layers.1.x` → `model.layers.5.x` where block 1 came from block 5."""
    return re.sub(r"\.(\d+)\.", lambda match: f".{number[int(match[1])]}.", name, count=1)
