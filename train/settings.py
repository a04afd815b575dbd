"""What a training run can be told. Kept apart from the code that trains, so that a config is read and checked without torch."""

from typing import Literal, Self

from pydantic import Field, model_validator

from draftsmith.settings import Settings


class TrainSettings(Settings):
    """How a draft is trained.

    tokens: how many cached tokens it sees in all (rows come again in a new order each epoch); matrix_lr: of Muon, for hidden
    matrices; other_lr: of AdamW, for heads, embeddings and norms; warmup: share of the steps; clip: norm of the gradient, 0 for
    none; validations: how often held-out acceptance is measured, on held_out_rows rows; patience: stop after so many validations
    without a better one, 0 for never; checkpoint_every: steps between two checkpoints; bad_rows: share of the rows that may be
    unreadable, each counted and left out.
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
    patience: int = Field(0, ge=0)
    checkpoint_every: int = Field(100, ge=1)
    bad_rows: float = Field(0.01, ge=0, lt=1)


class DistillSettings(TrainSettings):
    """blocks: which of the target's blocks the draft starts from; shape: sizes of a draft from scratch instead
    (`transformers` config names, for example hidden_size)."""

    blocks: tuple[int, ...] | None = None
    shape: dict[str, int] | None = None


class EagleTrainSettings(TrainSettings):
    """Shape and start of an EAGLE head besides its training.

    rollouts: training-time-test steps (1: none); decay: weight of each step relative to the one before; kv_heads, intermediate:
    as in the target unless given; draft_vocabulary: size V_d, the most frequent supervised tokens (null: the whole vocabulary);
    head_from_target: start the output head from the target's rows; embedding_start: start the layer so that it passes the
    joined token's embedding on (`models.eagle.start_from_embedding`).
    """

    rollouts: int = Field(5, ge=1)
    decay: float = Field(1.0, gt=0)
    layers: int = Field(1, ge=1)
    kv_heads: int | None = Field(None, ge=1)
    intermediate: int | None = Field(None, ge=1)
    draft_vocabulary: int | None = Field(None, ge=1)
    head_from_target: bool = True
    embedding_start: bool = True


class ScratchSettings(Settings):
    """Shape and training of a target from scratch.

    vocabulary: entries of tokenizer, embedding and head; intermediate: of the gated MLP; context: positions;
    bigram_epochs: passes over the pairs of tokens by which embedding and head start (`train.bigram`), 0 for none;
    embedding_lr, other_lr: low, or training unlearns those pairs; without them about 0.03 and 0.006 are right;
    tokens: seen in training, all epochs together; balance: a domain of n tokens is drawn with weight n^balance
    (1: as found, 0: all alike); warmup: share of the steps; clip: norm of the gradient, 0 for none; held_out_tokens:
    measured per domain.
    """

    vocabulary: int = Field(4096, ge=2)
    width: int = Field(256, ge=2)
    blocks: int = Field(4, ge=1)
    heads: int = Field(4, ge=1)
    kv_heads: int = Field(2, ge=1)
    intermediate: int = Field(512, ge=1)
    context: int = Field(1024, ge=2)
    tied: bool = False
    bigram_epochs: int = Field(25, ge=0)
    bigram_lr: float = Field(0.05, gt=0)
    tokens: int = Field(350_000, ge=1)
    batch_tokens: int = Field(1024, ge=2)
    balance: float = Field(0.3, ge=0, le=1)
    matrix_lr: float = Field(0.02, gt=0)
    embedding_lr: float = Field(0.002, gt=0)
    other_lr: float = Field(0.0006, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    warmup: float = Field(0.05, ge=0, le=1)
    clip: float = Field(1.0, ge=0)
    log_every: int = Field(10, ge=1)
    held_out_tokens: int = Field(8_000, ge=1)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not a multiple of heads {self.heads}")
        if self.width // self.heads % 2:
            raise ValueError(f"width / heads = {self.width // self.heads} is odd; rotary positions turn pairs")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        return self
