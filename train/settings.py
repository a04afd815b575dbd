"""What a training run can be told. Kept apart from the code that trains, so that a config is read and checked without torch."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from draftsmith.settings import Settings

LossName = Literal[
    "forward_kl",
    "reverse_kl",
    "jensen_shannon",
    "total_variation",
    "negative_log_acceptance",
    "adaptive_kl_tv",
    "cross_entropy",
    "top_k_cross_entropy",
]
Rest = Literal["bucket", "tail"]


class TrainSettings(Settings):
    """How a draft is trained.

    loss: one of `train.losses`, or several with their weights ({forward_kl: 0.5, total_variation: 0.5}); beta: of
    jensen_shannon, 0 is KL(p ‖ q), 1 is KL(q ‖ p); eta: of adaptive_kl_tv; top_k: tokens of top_k_cross_entropy; rest: how the mass
    of a top-k cache's unlisted tokens counts as acceptance, bucket (not at all) or tail (as far as the draft has mass there, too);
    temperature: of distillation, for target and draft alike, 1 unless the cache keeps the whole distribution.
    tokens: how many cached tokens it sees in all (rows come again in a new order each epoch); batch_tokens: of one micro-batch,
    padding included; accumulate: micro-batches of an optimiser step; matrix_lr: of Muon, for hidden matrices; other_lr: of AdamW,
    for heads, embeddings and norms; weight_decay: of matrices, heads and embeddings; warmup: share of the steps; clip: norm of
    the gradient, 0 for none; log_every: steps between two lines of training.jsonl.
    validations: how often held-out acceptance is measured, on held_out_rows rows; patience: stop after so many validations
    without a better one, 0 for never; checkpoint_every: steps between two checkpoints; bad_rows: share of the rows that may be
    unreadable, each counted and left out.
    """

    loss: LossName | dict[LossName, Annotated[float, Field(gt=0)]] = "forward_kl"
    beta: float = Field(0.5, ge=0, le=1)
    eta: float = Field(3.0, ge=0)
    rest: Rest = "bucket"
    top_k: int = Field(10, ge=1)
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
        users = {
            "beta": {"jensen_shannon"},
            "eta": {"adaptive_kl_tv"},
            "rest": by_acceptance,
            "top_k": {"top_k_cross_entropy"},
        }
        for option, names in users.items():
            if getattr(self, option) != type(self).model_fields[option].default and not names & set(self.mixture):
                raise ValueError(
                    f"{option}: {getattr(self, option)} changes nothing without {' or '.join(sorted(names))}; remove it"
                )
        if self.patience > max(0, self.validations - 2):
            raise ValueError(
                f"patience: {self.patience} can stop nothing before the last of {self.validations} validations; "
                f"set validations to {self.patience + 2} or more, or patience to 0"
            )
        return self


class OnPolicySettings(Settings):
    """Rows that the draft continues itself (`draftsmith.train.on_policy`).

    share: of the rows; every: optimiser steps after which the continuing draft gets the current weights; temperature: at which
    it samples.
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
        sizes = self.shape if isinstance(self.shape, dict) else {}
        if deep := [name for name, size in sizes.items() if name.endswith(("layer", "layers")) and size > LAYERS]:
            raise ValueError(f"shape.{deep[0]}: {sizes[deep[0]]:,} is more than {LAYERS:,}; give fewer")
        if missing := [name for name in wants if getattr(self, name) is None]:
            raise ValueError(f"start {start} needs {missing[0]}; add it")
        given = [name for name in ("blocks", "shape", "checkpoint") if getattr(self, name) is not None]
        if extra := [name for name in given if name not in takes]:
            raise ValueError(f"start {start} has no use for {extra[0]}; leave it out, or give another start")
        if self.head == "shared" and start not in ("blocks", "narrow"):
            raise ValueError(f"head shared: a draft that starts from {start} has no embedding of its target's")
        return self


LAYERS = 256  # of one model; more is a slip of the hand that would take minutes to be laid out

# What each kind of head has no use for.
OF_LAYER = ("layers", "kv_heads", "intermediate", "inputs", "fc_bias", "states_start")
OF_EAGLE = (*OF_LAYER, "detach", "feature_loss", "noise", "confidence")
OF_EAGLE3 = ("width", "taps", "norm_taps", "norm_state", "head_from_target", "embedding_start")
# The shape and first weights of a head, which a start from another head's folder brings along.
SHAPE = (*OF_EAGLE3, *OF_LAYER, "draft_vocabulary")
UNUSED = {"eagle3": (), "eagle1": (*OF_EAGLE3, "draft_vocabulary"), "medusa": (*OF_EAGLE, *OF_EAGLE3)}


class EagleTrainSettings(TrainSettings):
    """Kind, shape and start of a head besides its training.

    start: folder of a head of the same kind for this target, trained or imported, to continue from; shape, vocabulary and its
    mapping are that head's. kind: eagle3, eagle1 (EAGLE-2 is eagle1 with a dynamic tree) or medusa; the last two take cache.last.
    rollouts: training-time-test steps (1: none), for medusa the number of heads; decay: weight of each step relative to the one
    before; survival: a prediction also weighs as much as its chain is expected to get there.

    draft_vocabulary: size V_d, the most frequent supervised tokens, or below 1 the share of them that it must cover (null: the
    whole vocabulary). width, kv_heads, intermediate: as in the target unless given; taps: those of the cache's that are fused,
    ascending (null: all). head_from_target: start the output head from the target's rows; embedding_start: start the layer so that
    it passes the joined token's embedding on, in heads with no more value dimensions than they are wide; states_start: start it as
    a guess of the target's next state instead, which takes cache.last (both in `models.eagle_start`).
    norm_taps, norm_state: EAGLE-3.1. inputs: what a slot joins, "shifted" or one of EAGLE's ablations.

    detach: no gradient between rollout steps (HASS, together with top_k_cross_entropy). feature_loss: weight of the regression to
    the target's last state (EAGLE-1's published mixture, 1 to 0.1, is 10); noise: half-width of the uniform noise on the features
    (EAGLE-1). confidence: weight of training a further output to predict acceptance (0: the head has none).
    """

    start: str | None = Field(None, min_length=1)
    kind: Literal["eagle3", "eagle1", "medusa"] = "eagle3"
    rollouts: int = Field(5, ge=1, le=LAYERS)
    decay: float = Field(1.0, gt=0)
    survival: bool = False
    layers: int = Field(1, ge=1, le=LAYERS)
    width: int | None = Field(None, ge=2)
    kv_heads: int | None = Field(None, ge=1)
    intermediate: int | None = Field(None, ge=1)
    taps: tuple[int, ...] | None = Field(None, min_length=1)
    draft_vocabulary: Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, lt=1)] | None = None
    head_from_target: bool = True
    embedding_start: bool = True
    states_start: bool = False
    norm_taps: bool = False
    norm_state: bool = False
    inputs: Literal["shifted", "unshifted", "feature", "token"] = "shifted"
    fc_bias: bool = False
    detach: bool = False
    feature_loss: float = Field(0.0, ge=0)
    noise: float = Field(0.0, ge=0)
    confidence: float = Field(0.0, ge=0)

    @field_validator("draft_vocabulary", mode="before")
    @classmethod
    def _share_or_size(cls, value: Any) -> Any:
        """A share of everything is not a vocabulary of one token."""
        if isinstance(value, float) and value >= 1:
            raise ValueError(
                f"{value} is neither a share below 1 nor a number of tokens, which has no decimal point; null is the whole "
                "vocabulary"
            )
        return value

    @property
    def needs_last(self) -> bool:
        """Whether the cache must hold the target's last states."""
        return self.kind != "eagle3" or self.feature_loss > 0 or self.states_start

    @model_validator(mode="after")
    def _of_its_kind(self) -> Self:
        fields = type(self).model_fields
        if extra := [name for name in UNUSED[self.kind] if getattr(self, name) != fields[name].default]:
            raise ValueError(f"{extra[0]}: kind {self.kind} has no use for it; leave it out, or give another kind")
        if self.taps is not None and sorted(set(self.taps)) != list(self.taps):
            raise ValueError(f"taps: must rise, each named once; give {sorted(set(self.taps))}")
        if self.start and (given := [name for name in SHAPE if getattr(self, name) != fields[name].default]):
            raise ValueError(f"{given[0]}: a start from another head brings it along; leave it out, or leave start out")
        if self.feature_loss and self.width is not None:
            raise ValueError("feature_loss: compares the head's state with the target's, so leave width out")
        if self.states_start and self.inputs != "shifted":
            raise ValueError(f"states_start: is fitted to shifted inputs, not {self.inputs}; set states_start to false")
        if self.states_start and not self.head_from_target:
            raise ValueError(
                "states_start: guesses states as the target's output head reads them; set head_from_target to true, or "
                "states_start to false"
            )
        return self


class ScratchSettings(Settings):
    """Shape and training of a target from scratch.

    vocabulary: entries of tokenizer, embedding and head; width: of the states; blocks: attention and MLP, one after the other;
    heads, kv_heads: of the attention; intermediate: of the gated MLP; context: positions; tied: embedding and head are one matrix.
    bigram_epochs: passes over the pairs of tokens by which embedding and head start (`train.bigram`), 0 for none; bigram_lr: of
    these passes; matrix_lr: of Muon, for hidden matrices; embedding_lr, other_lr (head and norms): of AdamW, low, or training
    unlearns those pairs; without them about 0.03 and 0.006 are right; weight_decay: of matrices, head and embedding.
    tokens: seen in training, all epochs together; batch_tokens: of one step; balance: a domain of n tokens is drawn with weight
    n^balance (1: as found, 0: all alike); warmup: share of the steps; clip: norm of the gradient, 0 for none; log_every: steps
    between two lines of training.jsonl; held_out_tokens: measured per domain.
    """

    vocabulary: int = Field(4096, ge=2)
    width: int = Field(256, ge=2)
    blocks: int = Field(4, ge=1, le=LAYERS)
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
