"""Train an EAGLE head on the target's cached states, with rollouts of any length (1: without)."""

from pathlib import Path

import torch

from draftsmith.data.cache.online import AnyCache
from draftsmith.data.rows import Rows
from draftsmith.models.eagle import new_eagle_head
from draftsmith.models.target import Target
from draftsmith.models.vocabulary import DraftVocabulary
from draftsmith.train.held_out import HeldOut
from draftsmith.train.loop import Log, Summary, train
from draftsmith.train.objectives import EagleObjective
from draftsmith.train.settings import EagleTrainSettings


def draft_vocabulary(reader: AnyCache, target: Target, size: int | None) -> DraftVocabulary:
    """The `size` target tokens that are supervised most often in the cache, stop tokens always among them."""
    if size is None or size >= target.vocabulary:
        return DraftVocabulary.all_of(target.vocabulary)
    counts = torch.zeros(target.vocabulary, dtype=torch.long)
    for index in range(len(reader)):
        token_ids, supervised = reader.tokens(index)
        counts += torch.bincount(torch.from_numpy(token_ids[supervised]).long(), minlength=target.vocabulary)
    special = (
        set(target.tokenizer.all_special_ids) | set(target.eos_ids) if target.has_tokenizer else set(target.eos_ids)
    )
    return DraftVocabulary.most_frequent(counts, size, special)


def sample_taps(reader: AnyCache, rows: int = 8) -> torch.Tensor:
    """Taps [n, A, W] of the first rows of the cache."""
    return torch.cat([torch.from_numpy(reader[i].taps) for i in range(min(rows, len(reader)))])


def train_eagle(
    target: Target,
    reader: AnyCache,
    held_out: Rows,
    settings: EagleTrainSettings,
    folder: Path,
    seed: int,
    log: Log | None = None,
) -> Summary:
    """Train a head on the cache's taps and distribution; `folder` gets the best weights."""
    taps = reader.taps
    head = new_eagle_head(
        target,
        taps,
        draft_vocabulary(reader, target, settings.draft_vocabulary),
        layers=settings.layers,
        kv_heads=settings.kv_heads,
        intermediate=settings.intermediate,
        head_from_target=settings.head_from_target,
        sample_taps=sample_taps(reader) if settings.embedding_start else None,
        seed=seed,
    )
    rows = [held_out[i] for i in range(min(settings.held_out_rows, len(held_out)))]
    return train(
        EagleObjective(head, settings.rollouts, settings.decay, settings.loss),
        reader,
        HeldOut.of(target, rows, taps),
        settings,
        folder=folder,
        seed=seed,
        keep=lambda: head.save(folder),
        log=log,
        title=f"train-eagle {folder.name}",
    )
