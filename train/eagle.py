"""Train an EAGLE head on the target's cached states, with rollouts of any length (1: without)."""

from dataclasses import dataclass
from pathlib import Path

import torch

from draftsmith.data.cache.online import AnyCache
from draftsmith.data.rows import Rows
from draftsmith.models.eagle import new_eagle_head
from draftsmith.models.target import Target
from draftsmith.models.vocabulary import DraftVocabulary
from draftsmith.train.held_out import HeldOut
from draftsmith.train.loop import Log, Summary, train
from draftsmith.train.losses import make_loss
from draftsmith.train.objectives import EagleObjective
from draftsmith.train.settings import EagleTrainSettings
from draftsmith.train.teachers import frozen_head


@dataclass
class EagleSummary(Summary):
    """What a head's training came to. coverage: share of the cache's supervised tokens that the head can say; ceiling: mean mass
    that the target gives to what the head can say on the held-out rows: no acceptance of this head can be higher at T = 1."""

    coverage: float = 1.0
    ceiling: float = 1.0


def supervised_counts(reader: AnyCache, vocabulary: int) -> torch.Tensor:
    """[V] how often each target token is supervised in the cache."""
    counts = torch.zeros(vocabulary, dtype=torch.long)
    for index in range(len(reader)):
        token_ids, supervised = reader.tokens(index)
        counts += torch.bincount(torch.from_numpy(token_ids[supervised]).long(), minlength=vocabulary)
    return counts


def draft_vocabulary(reader: AnyCache, target: Target, size: int | None) -> DraftVocabulary:
    """The `size` target tokens that are supervised most often in the cache, stop tokens always among them."""
    if size is None or size >= target.vocabulary:
        return DraftVocabulary.all_of(target.vocabulary)
    special = (
        set(target.tokenizer.all_special_ids) | set(target.eos_ids) if target.has_tokenizer else set(target.eos_ids)
    )
    return DraftVocabulary.most_frequent(supervised_counts(reader, target.vocabulary), size, special)


@torch.no_grad()
def acceptance_ceiling(objective: EagleObjective, held_out: HeldOut) -> float:
    """Mean over held-out supervised positions of Σ_v p over the draft's vocabulary: what Σ_v min(p, q) comes to for the best q."""
    mass, count = 0.0, 0
    for batch in held_out.batches:
        assert batch.last is not None
        slots = objective.trained_slots(batch, 0)
        p = held_out.target.head(batch.last[objective.teacher_places(slots, 0)]).float().softmax(-1)
        mass += float(p[:, objective.vocabulary.target_ids.to(p.device)].sum())
        count += len(p)
    return mass / max(count, 1)


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
) -> EagleSummary:
    """Train a head on the cache's taps and distribution; `folder` gets the best weights."""
    taps = reader.taps
    vocabulary = draft_vocabulary(reader, target, settings.draft_vocabulary)
    head = new_eagle_head(
        target,
        taps,
        vocabulary,
        layers=settings.layers,
        kv_heads=settings.kv_heads,
        intermediate=settings.intermediate,
        head_from_target=settings.head_from_target,
        sample_taps=sample_taps(reader) if settings.embedding_start else None,
        seed=seed,
    )
    objective = EagleObjective(
        head, settings.rollouts, settings.decay, make_loss(settings), target_head=frozen_head(target)
    )
    rows = [held_out[i] for i in range(min(settings.held_out_rows, len(held_out)))]
    measured = HeldOut.of(target, rows, taps)
    coverage, ceiling = 1.0, 1.0
    if not vocabulary.full:
        coverage = vocabulary.coverage(supervised_counts(reader, target.vocabulary))
        ceiling = acceptance_ceiling(objective, measured)
        if log is not None:
            log({"vocabulary_coverage": coverage, "acceptance_ceiling": ceiling}, 0)
    summary = train(
        objective,
        reader,
        measured,
        settings,
        folder=folder,
        seed=seed,
        keep=lambda: head.save(folder),
        log=log,
        title=f"train-eagle {folder.name}",
    )
    return EagleSummary(**vars(summary), coverage=coverage, ceiling=ceiling)
