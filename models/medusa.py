"""Medusa heads (Cai et al. 2024, arXiv 2401.10774): K small heads on the target's last state, each for one position further ahead.

Head k reads h_t alone and predicts x_{t+2+k}: the target's own head has x_{t+1} already. No head sees what another one drafted,
so all of a tree's levels come from one state, and acceptance falls with depth. Knows neither losses nor decoding.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftsmith.errors import UserError
from draftsmith.models.heads import load_head, save_head
from draftsmith.models.target import Target
from draftsmith.models.vocabulary import DraftVocabulary


@dataclass(frozen=True)
class MedusaConfig:
    """Sizes, and the target whose states the heads were made for ("": any of the right sizes)."""

    kind: str
    heads: int
    target_width: int
    target_vocabulary: int
    draft_vocabulary: int
    target_fingerprint: str = ""

    def __post_init__(self) -> None:
        if self.kind != "medusa" or self.heads < 1:
            raise UserError(f"Medusa: kind {self.kind!r} with {self.heads} heads; there must be at least one")


class MedusaHeads(nn.Module):
    """The heads' trainable weights; nothing of the target's is among them."""

    def __init__(self, config: MedusaConfig, vocabulary: DraftVocabulary) -> None:
        super().__init__()
        if vocabulary.size != config.draft_vocabulary or vocabulary.target_size != config.target_vocabulary:
            raise UserError("Medusa: the draft vocabulary does not fit the heads' configuration")
        self.config = config
        self.vocabulary = vocabulary
        width = config.target_width
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(config.heads))
        self.lm_heads = nn.ModuleList(nn.Linear(width, vocabulary.size, bias=False) for _ in range(config.heads))

    def state(self, last: Tensor, k: int) -> Tensor:
        """h_t [..., W] → h_t + SiLU(W_k h_t + b_k) [..., W], what output head k reads."""
        if last.shape[-1] != self.config.target_width:
            raise UserError(f"Medusa: made for states of width {self.config.target_width}, given {last.shape[-1]}")
        return last + F.silu(self.blocks[k](last))

    def logits(self, state: Tensor, k: int) -> Tensor:
        """State of head k [..., W] → draft logits [..., V_d] of x_{t+2+k}."""
        return self.lm_heads[k](state)

    def save(self, folder: Path) -> None:
        """Write `config.json` and `model.safetensors`. Each file is atomic."""
        save_head(self, self.config, self.vocabulary, folder)

    @classmethod
    def load(cls, folder: Path, target: Target) -> "MedusaHeads":
        """Read heads made for this target. Raises UserError naming what is missing, extra or of another shape."""
        return load_head(folder, MedusaConfig, cls, target)


def new_medusa_heads(target: Target, vocabulary: DraftVocabulary, heads: int) -> MedusaHeads:
    """Fresh heads: W_k = 0 and every output head the target's own rows, so that each begins as the target's head does."""
    config = MedusaConfig(
        "medusa", heads, target.width, target.vocabulary, vocabulary.size, target_fingerprint=target.fingerprint()
    )
    fresh = MedusaHeads(config, vocabulary)
    with torch.no_grad():
        for block, lm_head in zip(fresh.blocks, fresh.lm_heads, strict=True):
            for parameter in block.parameters():
                parameter.zero_()
            if target.device.type != "meta":
                lm_head.get_parameter("weight").copy_(target.head_rows(vocabulary.target_ids))
    return fresh.to(target.device)
