"""Distil a draft LM: forward KL against the target's cached distribution, never against the text's own tokens."""

from pathlib import Path

from draftsmith.data.cache.reader import CacheReader
from draftsmith.data.rows import Rows
from draftsmith.errors import UserError
from draftsmith.files import is_main
from draftsmith.models.draft import DraftLM
from draftsmith.models.target import Target
from draftsmith.train.held_out import HeldOut
from draftsmith.train.loop import Log, Summary, train
from draftsmith.train.objectives import DraftLMObjective
from draftsmith.train.settings import DistillSettings


def new_draft(target: Target, settings: DistillSettings, seed: int) -> DraftLM:
    """The untrained start: from scratch if a shape is given, else cut out of the target (default: first and last block)."""
    if settings.shape is not None and settings.blocks is not None:
        raise UserError("distill: give blocks (cut out of the target) or shape (from scratch), not both")
    if settings.shape is not None:
        return DraftLM.from_scratch(target, settings.shape, seed)
    blocks = settings.blocks if settings.blocks is not None else sorted({0, target.blocks - 1})
    return DraftLM.from_target_blocks(target, blocks)


def distill(
    target: Target,
    reader: CacheReader,
    held_out: Rows,
    settings: DistillSettings,
    folder: Path,
    seed: int,
    log: Log | None = None,
) -> Summary:
    """Train a draft LM on the cache; `folder/distilled` gets the best weights, `folder/untrained` the start."""
    draft = new_draft(target, settings, seed)
    if is_main():
        draft.save(folder / "untrained", target)
    objective = DraftLMObjective(draft, settings.loss)
    rows = [held_out[i] for i in range(min(settings.held_out_rows, len(held_out)))]
    return train(
        objective,
        reader,
        HeldOut.of(target, rows, ()),
        settings,
        folder=folder,
        seed=seed,
        keep=lambda: draft.save(folder / "distilled", target),
        log=log,
        title="distill",
    )
