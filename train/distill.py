"""Distil a draft LM against the target's cached distribution."""

import copy
from pathlib import Path

from draftsmith.data.cache.online import AnyCache
from draftsmith.data.rows import Rows
from draftsmith.files import is_main
from draftsmith.models.draft import DraftLM
from draftsmith.models.target import Target
from draftsmith.train.held_out import HeldOut
from draftsmith.train.loop import Log, Source, Summary, train
from draftsmith.train.losses import make_loss
from draftsmith.train.objectives import DraftLMObjective
from draftsmith.train.on_policy import OnPolicy
from draftsmith.train.selective import Selective
from draftsmith.train.settings import DistillSettings
from draftsmith.train.teachers import frozen_head


def new_draft(target: Target, settings: DistillSettings, seed: int) -> DraftLM:
    """The untrained start (see `DistillSettings`)."""
    start = settings.starts_from
    if start == "checkpoint":
        return DraftLM.load(place(settings.checkpoint), target)
    if start == "blocks":
        blocks = settings.blocks if settings.blocks is not None else sorted({0, target.blocks - 1})
        return DraftLM.from_target_blocks(target, blocks, settings.head)
    assert settings.shape is not None
    if start == "narrow":
        return DraftLM.narrowed(target, settings.shape, seed, settings.head)
    return DraftLM.from_scratch(target, settings.shape, seed)


def _source(
    source: Source, draft: DraftLM, target: Target, objective: DraftLMObjective, settings: DistillSettings, seed: int
) -> Source:
    """The cached rows, some of them continued by the draft, some of their tokens left out, as the settings say."""
    if settings.on_policy is not None:
        source = OnPolicy(source, draft, target, settings.on_policy, seed)
    if settings.selective is not None:
        start = DraftLM(copy.deepcopy(draft.model).eval())
        reference = DraftLM.load(place(settings.selective.reference), target)
        source = Selective(source, start, reference, settings.selective.share, objective.cached_teacher)
    return source


def place(name: str | None) -> str:
    """A local folder with `~` resolved, or the hub name as it is."""
    path = Path(name or "").expanduser()
    return str(path) if path.exists() else str(name)


def distill(
    target: Target,
    reader: AnyCache,
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
    objective = DraftLMObjective(draft, make_loss(settings), target_head=frozen_head(target))
    rows = [held_out[i] for i in range(min(settings.held_out_rows, len(held_out)))]
    return train(
        objective,
        _source(reader, draft, target, objective, settings, seed),
        HeldOut.of(target, rows, ()),
        settings,
        folder=folder,
        seed=seed,
        keep=lambda: draft.save(folder / "distilled", target),
        log=log,
        title="distill",
    )
