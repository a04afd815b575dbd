"""Train an EAGLE head on the target's cached states, with rollouts of any length (1: without), or Medusa heads."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftsmith.data.cache.online import AnyCache
from draftsmith.data.rows import Rows
from draftsmith.errors import UserError
from draftsmith.models.eagle import EagleConfig, EagleHead, head_config, new_eagle_head
from draftsmith.models.eagle_start import Start, Text, can_start
from draftsmith.models.heads import head_kind, head_shape, read_config
from draftsmith.models.medusa import MedusaConfig, MedusaHeads, new_medusa_heads
from draftsmith.models.target import Target
from draftsmith.models.vocabulary import DraftVocabulary
from draftsmith.train.feeder import ROW_ERRORS, batch_plan
from draftsmith.train.held_out import HeldOut
from draftsmith.train.loop import Log, Summary, train
from draftsmith.train.losses import make_loss
from draftsmith.train.objectives import EagleObjective, MedusaObjective, Objective
from draftsmith.train.settings import EagleTrainSettings
from draftsmith.train.teachers import frozen_head


@dataclass
class EagleSummary(Summary):
    """What a head's training came to. start: what its layer started from, "states", "embedding", "random" or "a head"; coverage:
    share of the cache's supervised tokens that the head can say; ceiling: mean mass that the target gives to what the head can say
    on the held-out rows: the acceptance of the first step cannot be higher at T = 1."""

    start: str = "random"
    coverage: float = 1.0
    ceiling: float = 1.0


def supervised_counts(reader: AnyCache, vocabulary: int) -> torch.Tensor:
    """[V] how often each target token is supervised in the cache."""
    counts = torch.zeros(vocabulary, dtype=torch.long)
    for index in range(len(reader)):
        token_ids, supervised = reader.tokens(index)
        counts += torch.bincount(torch.from_numpy(token_ids[supervised]).long(), minlength=vocabulary)
    return counts


def draft_vocabulary(reader: AnyCache, target: Target, size: int | float | None) -> DraftVocabulary:
    """The `size` target tokens that are supervised most often in the cache, or below 1 as many as cover this share of them; stop
    tokens and other specials always among them."""
    if size is None or size >= target.vocabulary:
        return DraftVocabulary.all_of(target.vocabulary)
    special = (
        set(target.tokenizer.all_special_ids) | set(target.eos_ids) if target.has_tokenizer else set(target.eos_ids)
    )
    counts = supervised_counts(reader, target.vocabulary)
    if isinstance(size, float):
        covered = counts.sort(descending=True).values.cumsum(0) / counts.sum()
        size = min(int((covered < size).sum()) + 1 + len(special), target.vocabulary)
    return DraftVocabulary.most_frequent(counts, size, special)


@torch.no_grad()
def acceptance_ceiling(objective: Objective, held_out: HeldOut) -> float:
    """Mean over held-out supervised positions of Σ_v p over the draft's vocabulary: what Σ_v min(p, q) comes to for the best q."""
    mass, count = 0.0, 0
    for batch in held_out.batches:
        assert batch.last is not None
        slots = objective.trained_slots(batch, 0)
        p = held_out.target.head(batch.last[objective.teacher_places(slots, 0)]).float().softmax(-1)
        mass += float(p[:, objective.vocabulary.target_ids.to(p.device)].sum())
        count += len(p)
    return mass / max(count, 1)


def new_head(
    target: Target,
    taps: Sequence[int],
    vocabulary: DraftVocabulary,
    settings: EagleTrainSettings,
    reader: AnyCache | None = None,
    seed: int = 0,
) -> EagleHead | MedusaHeads:
    """An untrained head of the kind and shape that the settings describe. taps: those of the cache; reader: the cache, from whose
    states the layer of an EAGLE head starts (None: at random)."""
    if settings.kind == "medusa":
        return new_medusa_heads(target, vocabulary, settings.rollouts)
    columns = tap_columns(taps, settings)
    fused = [taps[i] for i in columns] if settings.kind == "eagle3" else ()
    shape: dict[str, Any] = {
        "kind": settings.kind,
        "width": settings.width,
        "layers": settings.layers,
        "kv_heads": settings.kv_heads,
        "intermediate": settings.intermediate,
        "inputs": settings.inputs,
        "fc_bias": settings.fc_bias,
        "norm_taps": settings.norm_taps,
        "norm_state": settings.norm_state,
        "confidence": settings.confidence > 0,
    }
    start: Start | None = None
    texts: Iterable[Text] = ()
    if reader is not None:
        start = layer_start(head_config(target, fused, vocabulary, **shape), settings)
        rows = rows_in_turn(reader, settings, seed) if start == "states" else range(len(reader))
        texts = CachedTexts(target, reader, columns, rows)
    return new_eagle_head(
        target,
        fused,
        vocabulary,
        head_from_target=settings.head_from_target,
        start=start,
        texts=texts,
        seed=seed,
        **shape,
    )


def layer_start(config: EagleConfig, settings: EagleTrainSettings) -> Start | None:
    """What the layer of a fresh head starts from; from the embedding only where its shape allows it, being the default."""
    if settings.states_start:
        return "states"
    return "embedding" if settings.embedding_start and can_start(config, "embedding") else None


def started_head(folder: Path, target: Target, settings: EagleTrainSettings) -> EagleHead | MedusaHeads:
    """The head in `folder`, to be trained on, with its own vocabulary. Raises UserError where it is of another kind or target."""
    return (MedusaHeads if started_config(folder, settings).kind == "medusa" else EagleHead).load(folder, target)


def started_shape(folder: Path, target: Target, settings: EagleTrainSettings) -> EagleHead | MedusaHeads:
    """The same head without its weights, from its configuration alone."""
    if started_config(folder, settings).kind == "medusa":
        return head_shape(folder, MedusaConfig, MedusaHeads, target)
    return head_shape(folder, EagleConfig, lambda config, vocabulary: EagleHead(config, vocabulary, target), target)


def started_config(folder: Path, settings: EagleTrainSettings) -> EagleConfig | MedusaConfig:
    """The configuration of the head in `folder`. Raises UserError where it cannot be trained as the settings say."""
    kind = head_kind(folder)
    if kind != settings.kind:
        raise UserError(
            f"eagle start: {folder} holds {kind or 'no head'}, not {settings.kind}; set kind, or another start"
        )
    config: EagleConfig | MedusaConfig = read_config(folder, MedusaConfig if kind == "medusa" else EagleConfig)
    if isinstance(config, MedusaConfig):
        if config.heads != settings.rollouts:
            raise UserError(f"eagle start: {folder} has {config.heads} Medusa heads; set rollouts to that")
    elif settings.confidence and not config.confidence:
        raise UserError(f"eagle start: {folder} has no confidence output to train; set confidence to 0")
    elif settings.feature_loss and config.width != config.target_width:
        raise UserError(f"eagle start: {folder} is narrower than its target's states; set feature_loss to 0")
    return config


def tap_columns(taps: Sequence[int], settings: EagleTrainSettings) -> list[int]:
    """Which of the cache's taps the head fuses. Raises UserError for a tap that the cache lacks."""
    wanted = taps if settings.taps is None else settings.taps
    if missing := [tap for tap in wanted if tap not in taps]:
        raise UserError(
            f"eagle taps: the cache has {list(taps)}, not {missing[0]}; set cache.taps, or choose among them"
        )
    return [list(taps).index(tap) for tap in wanted]


def new_objective(
    head: EagleHead | MedusaHeads, target: Target, taps: Sequence[int], settings: EagleTrainSettings
) -> Objective:
    """What the settings say is minimised, for a head of their kind."""
    loss, frozen = make_loss(settings), frozen_head(target)
    if isinstance(head, MedusaHeads):
        return MedusaObjective(head, settings.decay, loss, frozen, survival=settings.survival)
    return EagleObjective(
        head,
        settings.rollouts,
        settings.decay,
        loss,
        frozen,
        columns=tap_columns(taps, settings),
        detach=settings.detach,
        survival=settings.survival,
        feature_loss=settings.feature_loss,
        noise=settings.noise,
        confidence=settings.confidence,
    )


def rows_in_turn(reader: AnyCache, settings: EagleTrainSettings, seed: int) -> list[int]:
    """The rows that a training reads, each once, in the order in which it comes to them: a start from the states is fitted to no
    others."""
    plan = batch_plan(reader.lengths, settings, seed)
    return list(dict.fromkeys(row for step in plan for micro in step for row in micro))


@dataclass(frozen=True)
class CachedTexts:
    """These rows of the cache as texts that a head can start from, read anew every time, without those that cannot be read or are
    not finite: the training says what becomes of them."""

    target: Target
    reader: AnyCache
    columns: Sequence[int]
    rows: Sequence[int]

    @torch.no_grad()
    def __iter__(self) -> Iterator[Text]:
        embed = self.target.model.get_input_embeddings()
        for index in self.rows:
            try:
                row = self.reader[index]
            except ROW_ERRORS:
                continue
            taps = torch.from_numpy(row.taps[:, self.columns]).float()
            last = None if row.last is None else torch.from_numpy(row.last).float()
            if taps.isfinite().all() and (last is None or last.isfinite().all()):
                token_ids = torch.from_numpy(row.token_ids).long().to(self.target.device)
                yield Text(taps, embed(token_ids).float().cpu(), last)


def train_eagle(
    target: Target,
    reader: AnyCache,
    held_out: Rows,
    settings: EagleTrainSettings,
    folder: Path,
    seed: int,
    log: Log | None = None,
) -> EagleSummary:
    """Train a head on the cache's states and distribution; `folder` gets the best weights."""
    taps, start = reader.taps, "random"
    if settings.start is not None:
        start = "a head"
        head = started_head(Path(settings.start).expanduser(), target, settings)
        vocabulary = head.vocabulary
        if isinstance(head, EagleHead) and head.config.taps:
            settings = settings.model_copy(update={"taps": head.config.taps})
    else:
        vocabulary = draft_vocabulary(reader, target, settings.draft_vocabulary)
        head = new_head(target, taps, vocabulary, settings, reader, seed)
        if isinstance(head, EagleHead):
            start = layer_start(head.config, settings) or start
    objective = new_objective(head, target, taps, settings)
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
    return EagleSummary(**vars(summary), start=start, coverage=coverage, ceiling=ceiling)
