"""What a training run can be told. Kept apart from the code that trains, so that a config is read and checked without torch."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from draftsmith.settings import Settings

LossName = Literal[
    "forward_kl",
    "reverse_kl",
    "jensen_shannon",
    "total_variation",
    "negative_log_acceptance",
    "adaptive_kl_tv",
    "cross_entropy",
]
Rest = Literal["bucket", "tail"]


class TrainSettings(Settings):
    """How a draft is trained.

    loss: one of `train.losses`, or several with their weights ({forward_kl: 0.5, total_variation: 0.5}); beta: of
    jensen_shannon, 0 is KL(p ‖ q), 1 is KL(q ‖ p); eta: of adaptive_kl_tv; rest: how the mass of a top-k cache's unlisted tokens
    counts as acceptance, bucket (not at all) or tail (as far as the draft has mass there, too); temperature: of distillation, for
    target and draft alike, 1 unless the cache keeps the whole distribution.
    tokens: how many cached tokens it sees in all (rows come again in a new order each epoch); matrix_lr: of Muon, for hidden
    matrices; other_lr: of AdamW, for heads, embeddings and norms; warmup: share of the steps; clip: norm of the gradient, 0 for
    none; validations: how often held-out acceptance is measured, on held_out_rows rows; patience: stop after so many validations
    without a better one, 0 for never; checkpoint_every: steps between two checkpoints; bad_rows: share of the rows that may be
    unreadable, each counted and left out.
    """

    loss: LossName | dict[LossName, Annotated[float, Field(gt=0)]] = "forward_kl"
    beta: float = Field(0.5, ge=0, le=1)
    eta: float = Field(3.0, ge=0)
    rest: Rest = "bucket"
    temperature: float = Field(1.0, gt=0)
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

    @property
    def mixture(self) -> dict[LossName, float]:
        """The weight of each loss."""
        return self.loss if isinstance(self.loss, dict) else {self.loss: 1.0}

    @model_validator(mode="after")
    def _used(self) -> Self:
        if not self.mixture:
            raise ValueError("loss: names no loss; give one, or several with their weights")
        by_acceptance = {"total_variation", "negative_log_acceptance", "adaptive_kl_tv"}
        users = {"beta": {"jensen_shannon"}, "eta": {"adaptive_kl_tv"}, "rest": by_acceptance}
        for option, names in users.items():
            if getattr(self, option) != type(self).model_fields[option].default and not names & set(self.mixture):
                raise ValueError(
                    f"{option}: {getattr(self, option)} changes nothing without {' or '.join(sorted(names))}; remove it"
                )
        return self


class OnPolicySettings(Settings):
    """Rows that the draft continues itself (`draftsmith.train.on_policy`).

    share: of the rows of every batch; every: batches after which the continuing draft gets the current weights; temperature: at
    which it samples.
    """

    share: float = Field(0.5, ge=0, le=1)
    every: int = Field(16, ge=1)
    temperature: float = Field(1.0, gt=0)


class SelectiveSettings(Settings):
    """Tokens worth a small draft's capacity (`draftsmith.train.selective`).

    share: of the supervised tokens of every batch that is trained; reference: folder of a trained draft of this kind.
    """

    share: float = Field(0.4, gt=0, le=1)
    reference: str = Field(min_length=1)


class DistillSettings(TrainSettings):
    """Where the draft LM starts, and what of the cache it learns from.

    start: "blocks" (cut out of the target), "scratch" (random), "narrow" (a random body between the target's embedding and head,
    projected to its width), "checkpoint" (another LM of the same tokenizer); unless given, what the other fields say.
    blocks: which of the target's blocks a cut keeps (null: the first and the last).
    shape: of a random body: "half", "quarter" or "eighth" of the target, or sizes by their `transformers` config names.
    checkpoint: folder or hub name.
    head: "copied" trains the embedding and head that a cut or narrow draft has from its target, "shared" leaves them as they are.
    """

    start: Literal["blocks", "scratch", "narrow", "checkpoint"] | None = None
    blocks: tuple[int, ...] | None = None
    shape: Literal["half", "quarter", "eighth"] | dict[str, Annotated[int, Field(ge=1)]] | None = None
    checkpoint: str | None = None
    head: Literal["copied", "shared"] = "copied"
    on_policy: OnPolicySettings | None = None
    selective: SelectiveSettings | None = None

    @property
    def starts_from(self) -> str:
        """`start`, or what the other fields imply."""
        implied = "checkpoint" if self.checkpoint else "scratch" if self.shape is not None else "blocks"
        return self.start or implied

    @model_validator(mode="after")
    def _one_start(self) -> Self:
        start = self.starts_from
        wants = {"blocks": (), "scratch": ("shape",), "narrow": ("shape",), "checkpoint": ("checkpoint",)}[start]
        takes = (*wants, "blocks") if start == "blocks" else wants
        if missing := [name for name in wants if getattr(self, name) is None]:
            raise ValueError(f"start {start} needs {missing[0]}; add it")
        given = [name for name in ("blocks", "shape", "checkpoint") if getattr(self, name) is not None]
        if extra := [name for name in given if name not in takes]:
            raise ValueError(f"start {start} has no use for {extra[0]}; leave it out, or give another start")
        if self.head == "shared" and start not in ("blocks", "narrow"):
            raise ValueError(f"head shared: a draft that starts from {start} has no embedding of its target's")
        return self


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
