"""Tiny targets and toy tokenizers for all tests: 4 blocks, width 32, about 150 tokens, fp32, seeded."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
)

from draftsmith.data.batches import Batch, TopK
from draftsmith.data.corpus import DataSettings
from draftsmith.data.rows import Row, Rows, write_rows
from draftsmith.data.tokenizer import tokenizer_digest
from draftsmith.models.draft import DraftLM
from draftsmith.models.eagle import EagleHead, new_eagle_head
from draftsmith.models.target import Target
from draftsmith.models.vocabulary import DraftVocabulary
from draftsmith.train.objectives import DraftLMObjective, EagleObjective, Objective
from draftsmith.train.teachers import Teacher

WIDTH, BLOCKS, CONTEXT, WINDOW = 32, 4, 256, 8
TAPS, STEPS = (0, 1, 2), 7
FLAVOURS = ("plain", "tied", "padded-vocab", "gemma2", "mistral-window", "two-blocks", "three-blocks")
WORDS = (
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "seven",
    "wizards",
    "box",
    "in",
    "fog",
)  # of random texts
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,:;!?()[]{}'\"-+*/=<>_#@$%&|~^\\`\n\té"
SENTENCES = (
    "the quick brown fox jumps over the lazy dog",
    "def add(a, b): return a + b",
    "what does the function return? it returns the sum of its arguments.",
    "for index in range(10): print(index)",
)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "<|assistant|>{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}"
    "{% else %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@cache
def _backend() -> str:
    """About 150 tokens: single characters, a few merges, and the specials. Deterministic."""
    tokenizer = Tokenizer(models.BPE(unk_token="<|pad|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never")
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="never")
    specials = ["<|endoftext|>", "<|pad|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=150, special_tokens=specials, initial_alphabet=list(LETTERS), show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", tokenizer.token_to_id("<|endoftext|>"))]
    )
    return tokenizer.to_str()


def tiny_tokenizer(template: str | None = CHAT_TEMPLATE, **options: Any) -> PreTrainedTokenizerFast:
    """A tokenizer of 150 entries; its end of turn <|end|> is not EOS. `options` override specials (pad_token=None)."""
    settings = {
        "bos_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|pad|>",
        "extra_special_tokens": ["<|user|>", "<|assistant|>", "<|system|>", "<|end|>"],
    }
    chosen = {key: value for key, value in (settings | options).items() if value is not None}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(_backend()), **chosen)
    tokenizer.chat_template = template
    return tokenizer


def tiny_config(flavour: str = "plain", vocabulary: int | None = None, **options: Any) -> Any:
    """The `transformers` configuration of one flavour (see `FLAVOURS`); `options` override its fields."""
    ids = vocabulary if vocabulary is not None else len(tiny_tokenizer())
    common: dict[str, Any] = {
        "vocab_size": ids,
        "hidden_size": WIDTH,
        "intermediate_size": 64,
        "num_hidden_layers": {"two-blocks": 2, "three-blocks": 3}.get(flavour, BLOCKS),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.2,  # far from uniform: a flipped convention must show
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 1,
        "tie_word_embeddings": flavour in ("tied", "gemma2"),
    }
    if flavour == "padded-vocab":
        common["vocab_size"] = ids + 10
    if flavour == "gemma2":
        special = {"final_logit_softcapping": 5.0, "attn_logit_softcapping": 10.0, "query_pre_attn_scalar": 8}
        return Gemma2Config(**(common | special | {"sliding_window": WINDOW} | options))
    if flavour == "mistral-window":
        return MistralConfig(**(common | {"sliding_window": WINDOW} | options))
    if flavour not in FLAVOURS:
        raise ValueError(f"unknown flavour {flavour!r}; there are {FLAVOURS}")
    return LlamaConfig(**(common | options))


def tiny_model(flavour: str = "plain", seed: int = 0, vocabulary: int | None = None, **options: Any) -> Any:
    """A random fp32 causal LM in eval mode. Norm gains differ from their start value, so that a missing norm shows."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(flavour, vocabulary, **options), dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.data.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def tiny_target(flavour: str = "plain", seed: int = 0, **options: Any) -> Target:
    """A tiny target without a folder on disk."""
    return Target(tiny_model(flavour, seed, **options), tiny_tokenizer(), flavour)


def near_copy(noise: float = 0.03) -> DraftLM:
    """The plain tiny target's weights with noise: a draft that is often right and often wrong."""
    model = tiny_model()
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    return DraftLM(model)


def tiny_target_folder(folder: Path, flavour: str = "plain", seed: int = 0, **options: Any) -> Path:
    """Save a tiny target with its tokenizer as an ordinary `transformers` folder under `folder`; return its path."""
    place = Path(folder) / f"target-{flavour}-{seed}"
    tiny_model(flavour, seed, **options).save_pretrained(place)
    tiny_tokenizer().save_pretrained(place)
    return place


def tiny_rows(folder: Path, lengths: Sequence[int], seed: int = 0, **settings: Any) -> Rows:
    """Prepared rows of random tokens of these lengths, the first half of each (at least token 0) unsupervised."""
    tokenizer = tiny_tokenizer()
    rng = np.random.default_rng(seed)
    rows = []
    for index, length in enumerate(lengths):
        ids = rng.integers(6, len(tokenizer), length).astype(np.int32)
        supervised = np.arange(length) >= max(1, length // 2)
        rows.append(Row(ids, supervised, ("code", "prose", "chat")[index % 3], f"document-{index}"))
    write_rows(rows, Path(folder) / "rows" / "train", DataSettings(**settings), tokenizer_digest(tokenizer))
    return Rows.open(Path(folder) / "rows", "train")


def in_twos(rows: Rows) -> Rows:
    """The same rows, two to a document: the second begins with 18 tokens of the first. Written over the old ones."""
    changed = [row._replace(document=rows[index // 2 * 2].document) for index, row in enumerate(rows)]
    for first, second in zip(changed[::2], changed[1::2], strict=True):
        second.token_ids[:18] = first.token_ids[:18]
    write_rows(changed, rows.folder, DataSettings(), rows.tokenizer)
    return Rows.open(rows.folder.parent, rows.folder.name)


def a_head(target: Target, layers: int = 1, **options: Any) -> EagleHead:
    """A random head whose weights are far from their start values, so that a missing one shows."""
    head = new_eagle_head(target, TAPS, DraftVocabulary.all_of(target.vocabulary), layers=layers, **options)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return head


def a_batch(target: Target, lengths: Sequence[int], seed: int = 0, k: int = 5) -> Batch:
    """Random rows with states and a top-k teacher of the target; the second half of each row is supervised."""
    torch.manual_seed(seed)
    T = max(lengths)
    ids = torch.randint(6, 100, (len(lengths), T))
    n = torch.tensor(lengths)
    place = torch.arange(T)[None]
    ids = torch.where(place < n[:, None], ids, 0)
    with torch.no_grad():
        out = target.forward(ids, TAPS)
    log_probs, top = out.logits.log_softmax(-1).topk(k)
    supervised = (place >= n[:, None] // 2) & (place < n[:, None])
    return Batch(ids, supervised, n, out.taps, out.last, TopK(top, log_probs))


def objectives(target: Target) -> list[Objective]:
    """One of each kind of draft, untrained."""
    return [
        DraftLMObjective(DraftLM.from_target_blocks(target, [0, 3])),
        EagleObjective(a_head(target), STEPS, 0.8),
    ]


TEACHERS = ("dense", "dense pruned", "top 1", "top 5", "top all", "top 5 unsayable", "sampled", "sampled unsayable")


def a_teacher(kind: str, p: torch.Tensor) -> Teacher:
    """One of `TEACHERS` for p [N, V], V the draft's vocabulary, with tokens. Unsayable: a third of the columns, and row 1 whole."""
    N, V = p.shape
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(-1, V, (N,), generator=generator)
    if kind.startswith("dense"):
        outside = torch.full((N, 2), 0.1, dtype=p.dtype)
        return Teacher(None, torch.cat([0.8 * p, outside], 1) if kind == "dense pruned" else p, None, tokens)
    if kind.startswith("top"):
        size = kind.split()[1]
        known, ids = p.topk(V if size == "all" else int(size), dim=-1)
        weight = None
    else:
        drawn = torch.multinomial(p, 8, replacement=True, generator=generator)
        count = torch.zeros_like(p).scatter_add(1, drawn, torch.ones_like(p)[:, :1].expand(N, 8))
        weight, ids = (count / 8).topk(8, dim=-1)
        ids = torch.where(weight > 0, ids, -1)
        known = torch.where(weight > 0, p.gather(1, ids.clamp(min=0)), 0.0)
    if kind.endswith("unsayable"):
        ids = torch.where((ids % 3 == 0) | (torch.arange(N)[:, None] == 1), -1, ids)
    return Teacher(ids, known, weight, tokens)
