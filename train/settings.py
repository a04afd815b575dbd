"""What a training run can be told. Kept apart from the code that trains, so that a config is read and checked without torch."""

from typing import Literal

from pydantic import Field

from draftsmith.settings import Settings


class TrainSettings(Settings):
    """How a draft is trained.

    tokens: how many cached tokens it sees in all (rows come again in a new order each epoch); matrix_lr: of Muon, for hidden
    matrices; other_lr: of AdamW, for heads, embeddings and norms; warmup: share of the steps; clip: norm of the gradient, 0 for
    none; validations: how often held-out acceptance is measured, on held_out_rows rows.
    """

    loss: Literal["forward_kl", "total_variation", "negative_log_acceptance", "adaptive_kl_tv"] = "forward_kl"
    tokens: int = Field(200_000, ge=1)
    batch_tokens: int = Field(2048, ge=1)
    accumulate: int = Field(1, ge=1)
    matrix_lr: float = Field(0.02, gt=0)
    other_lr: float = Field(0.002, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    warmup: float = Field(0.1, ge=0, le=1)
    clip: float = Field(1.0, ge=0)
    log_every: int = Field(10, ge=1)
    validations: int = Field(4, ge=1)
    held_out_rows: int = Field(12, ge=1)


class DistillSettings(TrainSettings):
    """blocks: which of the target's blocks the draft starts from; shape: sizes of a draft from scratch instead
    (`transformers` config names, for example hidden_size)."""

    blocks: tuple[int, ...] | None = None
    shape: dict[str, int] | None = None


class EagleTrainSettings(TrainSettings):
    """rollouts: training-time-test steps; decay: weight of each step relative to the one before; draft_vocabulary: size V_d, the
    most frequent supervised tokens (null: the whole vocabulary); head_from_target: start the output head from the target's rows."""

    rollouts: int = Field(5, ge=1)
    decay: float = Field(1.0, gt=0)
    layers: int = Field(1, ge=1)
    kv_heads: int | None = Field(None, ge=1)
    intermediate: int | None = Field(None, ge=1)
    draft_vocabulary: int | None = Field(None, ge=1)
    head_from_target: bool = True
    embedding_start: bool = True
