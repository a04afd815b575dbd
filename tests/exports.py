"""Heads for the tests of formats: saved far from their start, half a vocabulary, and what the trainer computes with them."""

from pathlib import Path
from typing import Any

import torch
from kit import TAPS

from draftsmith.models.eagle import EagleHead, new_eagle_head
from draftsmith.models.target import Target
from draftsmith.models.vocabulary import DraftVocabulary
from draftsmith.train.rollout import rollout


def half_of(target: Target) -> DraftVocabulary:
    """Every second of the target's tokens."""
    return DraftVocabulary(torch.arange(0, target.vocabulary, 2), target.vocabulary)


def saved(
    folder: Path,
    target: Target,
    vocabulary: DraftVocabulary | None = None,
    taps: tuple[int, ...] = TAPS,
    **options: Any,
) -> EagleHead:
    """A head whose every weight is far from its start value, in a folder."""
    vocabulary = vocabulary or DraftVocabulary.all_of(target.vocabulary)
    head = new_eagle_head(target, () if options.get("kind") == "eagle1" else taps, vocabulary, **options)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    head.save(folder)
    return head


def trainers_logits(head: EagleHead, target: Target, ids: torch.Tensor, steps: int) -> torch.Tensor:
    """Logits [steps, V] of the last slot's rollout, as training computes them; −inf where the draft has no token."""
    with torch.no_grad():
        out = target.forward(ids[None], head.config.taps)
        features = out.taps if head.config.taps else out.last
        slot = len(ids) - steps - 1
        found = [head.logits(state)[0, slot] for state in rollout(head, ids[None], features, steps)]
    wide = torch.full((steps, target.vocabulary), float("-inf"))
    wide[:, head.vocabulary.target_ids] = torch.stack(found)
    return wide
