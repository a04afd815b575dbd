"""What training a draft holds in memory on one rank, term by term with the arithmetic: resident tensors, and the largest moment.

Knows the sizes of draft, target and batch, and what `loop`, `rollout` and `fused` keep of them in fp32; runs nothing and measures
nothing. The counts per slot are those of tensors that autograd saves: tests hold them against what it does save.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from draftsmith.data.cache.codecs import DISTRIBUTION_CODECS
from draftsmith.data.cache.fields import cache_fields
from draftsmith.data.cache.manifest import CacheSettings
from draftsmith.models.eagle import EagleConfig, EagleHead
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.target import DTYPES, Target
from draftsmith.train.fused import CHUNK_NUMBERS
from draftsmith.train.optim import make_optimizer, training_bytes
from draftsmith.train.rollout import SLOTS
from draftsmith.train.settings import DistillSettings, EagleTrainSettings, TrainSettings

FP32 = 4  # bytes of a number
LEFT_OUT = (
    "the allocator's slack, threads' work areas, shards of the cache that are mapped (pages the system takes back), "
    "the target's own pass with cache.online, "
    "the trackers, and on a GPU compiled kernels and autocast's copies of weights"
)


@dataclass(frozen=True)
class Term:
    """One thing in memory: its name, its bytes, and how they come about."""

    name: str
    bytes: int
    arithmetic: str


@dataclass(frozen=True)
class Memory:
    """held: all the time; moments: parts of a run that follow each other, of which the largest counts."""

    held: list[Term]
    moments: dict[str, list[Term]]

    @property
    def largest(self) -> str:
        """The moment that takes most."""
        return max(self.moments, key=lambda name: _sum(self.moments[name]))

    @property
    def total(self) -> int:
        """Bytes at the largest moment."""
        return _sum(self.held) + _sum(self.moments[self.largest])


@dataclass(frozen=True)
class Run:
    """A training as far as memory goes: one draft under its settings. longest: tokens of the longest row; dtype: the target's."""

    draft: nn.Module
    target: Target
    settings: TrainSettings
    cache: CacheSettings
    longest: int
    dtype: str = "float32"

    @property
    def slots(self) -> int:
        """Padded slots of a full micro-batch."""
        return max(self.settings.batch_tokens, self.longest)

    @property
    def columns(self) -> tuple[int, int, int]:
        """(H, V_d, K): width that the output head reads, tokens that it writes, rollout steps or heads."""
        if isinstance(self.draft, EagleHead):
            assert isinstance(self.settings, EagleTrainSettings)
            return self.draft.config.width, self.draft.config.draft_vocabulary, self.settings.rollouts
        if isinstance(self.draft, MedusaHeads):
            return self.target.width, self.draft.config.draft_vocabulary, self.draft.config.heads
        return _text(self.draft).hidden_size, self.target.vocabulary, 1

    @property
    def whole(self) -> bool:
        """Whether the teacher is a distribution over all tokens, computed again from the last states."""
        return not DISTRIBUTION_CODECS[self.cache.distribution].parts


def training_memory(run: Run, process: int = 0) -> Memory:
    """Bytes of one rank. process: those of Python with all libraries, before a model is there.

    FSDP2 divides weights, moments and gradients by the ranks; the rest each rank has for itself.
    """
    trained = [p for p in run.draft.parameters() if p.requires_grad]
    count = sum(p.numel() for p in trained)
    gradients = Term("gradients", FP32 * count, f"4 B · {count:,}")
    moments = training_bytes(run.draft) - 2 * FP32 * count
    held = [
        Term("process", process, "this process now: Python, torch, transformers"),
        _target(run),
        Term("weights", FP32 * count, f"fp32 masters: 4 B · {count:,}"),
        Term("optimiser", moments, "4 B for each number of a hidden matrix (Muon), 8 B for others (AdamW)"),
        *_frozen(run),
        _batch(run),
        _held_out(run),
    ]
    copies = 2 * (FP32 * count + moments)
    return Memory(
        held,
        {
            "forward and backward": [gradients, *_activations(run), *_loss(run)],
            "update": [gradients, _update(run.draft)],
            "validation": [_validation(run)],
            "checkpoint": [Term("copies", copies, "2 · (weights + optimiser): a copy, and the same as it is written")],
        },
    )


def saved_per_slot(run: Run) -> tuple[int, str]:
    """Numbers that autograd saves for each padded slot of a micro-batch, all blocks and rollout steps together, and how they add
    up; the output head and the loss are counted apart."""
    if isinstance(run.draft, MedusaHeads):
        width, _, heads = run.columns
        return heads * width, f"K·W, K = {heads}, W = {width:,}"
    if isinstance(run.draft, EagleHead):
        config, steps = run.draft.config, run.columns[2]
        first, layer, terms = _eagle_layers(config)
        scores = 2 * config.heads * run.longest if run.longest <= SLOTS else 0  # longer rows make them again
        total = steps * (first + (config.layers - 1) * layer) + (steps - 1) * config.layers * scores
        text = f"K·({terms})" + (f" + (K−1)·{config.layers}·2·{config.heads}·{run.longest} scores" if scores else "")
        return total, f"{text}, K = {steps}"
    return _lm(run)


def _lm(run: Run) -> tuple[int, str]:
    """A draft LM of dense blocks as in Llama: two norms, attention that keeps no scores, a gated MLP; of others roughly."""
    text = _text(run.draft)
    H, layers, heads = text.hidden_size, text.num_hidden_layers, text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or H // heads
    Q, KV = heads * head_dim, (getattr(text, "num_key_value_heads", None) or heads) * head_dim
    inner = getattr(text, "intermediate_size", None) or 4 * H
    normed = 4 if any(name.endswith("q_norm") for name, _ in run.draft.named_modules()) else 2
    drops = getattr(text, "attention_dropout", None) or getattr(text, "attn_pdrop", None)
    scores = 3 * heads * run.longest if drops else 0
    block = 6 * H + normed * (Q + KV) + 4 * inner + scores
    terms = f"6H + {normed}Q + {normed}KV + 4I" + (
        f" + 3·{heads}·{run.longest} scores, kept for dropout" if drops else ""
    )
    return layers * block + 2 * H, f"{layers}·({terms}) + 2H, H = {H:,}, Q = {Q:,}, KV = {KV:,}, I = {inner:,}"


def _eagle_layers(config: EagleConfig) -> tuple[int, int, str]:
    """Numbers per slot and step of the first layer and of each later one, and their arithmetic."""
    W, H, Q, inner = config.target_width, config.width, config.heads * config.head_dim, config.intermediate
    attention = 5 * Q + 4 * inner  # query, own key and value (repeated for their groups), output twice; the gated MLP
    first = 2 * W + (6 if config.kind == "eagle3" else 4) * H + attention
    later = 6 * H + attention
    sizes = f"W = {W:,}, H = {H:,}, Q = {Q:,}, I = {inner:,}"
    text = f"2W + {6 if config.kind == 'eagle3' else 4}H + 5Q + 4I"
    text += f" + {config.layers - 1}·(6H + 5Q + 4I)" if config.layers > 1 else ""
    return first, later, f"{text}; {sizes}"


def _activations(run: Run) -> list[Term]:
    numbers, arithmetic = saved_per_slot(run)
    terms = [
        Term(
            "activations", FP32 * run.slots * numbers, f"4 B · {run.slots:,} slots · {numbers:,}; per slot {arithmetic}"
        )
    ]
    if isinstance(run.draft, EagleHead) and run.columns[2] > 1 and run.longest > SLOTS:
        rows, heads = max(1, run.slots // run.longest), run.draft.config.heads
        terms.append(
            Term(
                "attention scores",
                4 * FP32 * rows * heads * SLOTS * run.longest,
                f"4 · 4 B · {rows} rows · {heads} heads · {SLOTS} · {run.longest:,}, made again piece by piece",
            )
        )
    return terms


def _loss(run: Run) -> list[Term]:
    """Head and loss, of which no [slots, V_d] logits are kept but a chunk (`train.fused`)."""
    width, vocabulary, steps = run.columns
    columns = max(vocabulary, run.target.vocabulary if run.whole else run.cache.k)
    rows = min(run.slots, max(1, CHUNK_NUMBERS // columns))
    buffers = 6 if run.whole else 2
    states = 3 if isinstance(run.draft, EagleHead) and run.draft.lm_head is not None else 1
    terms = [
        Term(
            "head's states",
            FP32 * run.slots * steps * states * width,
            f"4 B · {run.slots:,} slots (all supervised) · {steps} · {states} · {width:,}",
        ),
        Term(
            "logits' chunk",
            FP32 * buffers * rows * columns,
            f"{buffers} buffers · 4 B · {rows:,} slots · {columns:,} tokens",
        ),
    ]
    if _fused(run):
        size = FP32 * (steps + 1) * vocabulary * width
        terms.append(
            Term("head's gradients", size, f"4 B · (K + 1) · {vocabulary:,} · {width:,}: one a step until backward")
        )
    return terms


def _fused(run: Run) -> bool:
    """Whether head and loss are one function, which keeps a gradient of the head's weights for each step."""
    if isinstance(run.draft, EagleHead):
        return run.draft.lm_head is not None
    head = None if isinstance(run.draft, MedusaHeads) else cast(Any, run.draft).get_output_embeddings()
    return getattr(head, "bias", None) is None


def _update(draft: nn.Module) -> Term:
    """Muon's iteration over all matrices of one shape at once: directions, their stack, the iterate and the next one."""
    shapes = Counter(
        tuple(p.shape) for g in make_optimizer(draft, 0.0, 0.0).param_groups if g["rule"] == "muon" for p in g["params"]
    )
    if not shapes:
        return Term("Muon", 0, "no hidden matrices")
    (rows, columns), number = max(shapes.items(), key=lambda entry: entry[0][0] * entry[0][1] * entry[1])
    return Term("Muon", 4 * FP32 * number * rows * columns, f"4 · 4 B · {number} matrices of {rows:,} x {columns:,}")


def _target(run: Run) -> Term:
    count, size = sum(p.numel() for p in run.target.model.parameters()), DTYPES[run.dtype].itemsize
    return Term("target", size * count, f"{size} B · {count:,}: validation, embedding, frozen head")


def _frozen(run: Run) -> list[Term]:
    """Whole models beside the draft, and parts of it that are not trained."""
    size, settings = FP32 * sum(p.numel() for p in run.draft.parameters()), run.settings
    still = FP32 * sum(p.numel() for p in run.draft.parameters() if not p.requires_grad)
    terms = []
    if still and not (
        isinstance(settings, DistillSettings) and settings.starts_from == "blocks" and run.dtype == "float32"
    ):
        terms.append(Term("frozen weights", still, f"4 B · {still // FP32:,}"))
    if isinstance(settings, DistillSettings) and settings.on_policy is not None:
        terms.append(Term("writer", size, "a copy of the draft, which continues rows"))
    if isinstance(settings, DistillSettings) and settings.selective is not None:
        terms.append(Term("start and reference", 2 * size, "two drafts of this size, which choose tokens"))
    return terms


def _batch(run: Run) -> Term:
    """A step's micro-batches: taps and last states, padded and once more as their draft reads them, and the teacher."""
    fields = cache_fields(run.cache, run.target.width, run.target.vocabulary, run.target.blocks)
    states = len(fields.get("taps", {}).get("blocks", ())) + ("last" in fields)
    listed = 0 if run.whole else run.cache.k * (16 if run.cache.distribution == "sampled" else 12)
    a_slot = 2 * FP32 * states * run.target.width + listed + 9
    arithmetic = f"{run.settings.accumulate} · {run.slots:,} slots · {a_slot:,} B (2 · 4 B · {states} states of "
    arithmetic += f"{run.target.width:,}, teacher {listed:,} B, id and mask 9 B)"
    return Term("batch", run.settings.accumulate * run.slots * a_slot, arithmetic)


def _held_out(run: Run) -> Term:
    states = 1
    if not isinstance(run.settings, DistillSettings):
        states += len(
            cache_fields(run.cache, run.target.width, 1 << 31, run.target.blocks).get("taps", {}).get("blocks", ())
        )
    rows = run.settings.held_out_rows
    size = FP32 * rows * run.longest * states * run.target.width
    return Term("held-out rows", size, f"4 B · {rows} rows · {run.longest:,} · {states} states of {run.target.width:,}")


def _validation(run: Run) -> Term:
    """Of one row: logits and probabilities over all tokens, unchunked, then what the draft says of its own."""
    vocabulary, own = run.target.vocabulary, run.columns[1]
    numbers = max(2 * vocabulary + own, 5 * own)
    return Term(
        "distributions of a row",
        FP32 * run.longest * numbers,
        f"4 B · {run.longest:,} · {numbers:,}, the larger of 2V + V_d and 5V_d",
    )


def _sum(terms: list[Term]) -> int:
    return sum(term.bytes for term in terms)


def _text(model: Any) -> Any:
    return model.config.get_text_config()
