"""The figures of docs/scaling.md, from the functions of the pipeline; run it again after a change of codecs or heads."""

import sys
from pathlib import Path

import torch

from draftsmith.data.cache.codecs import STATE_CODECS
from draftsmith.data.cache.fields import bytes_per_token, cache_fields
from draftsmith.data.cache.manifest import CacheSettings
from draftsmith.models.eagle import EagleConfig, EagleHead
from draftsmith.models.target import choose_taps
from draftsmith.models.vocabulary import DraftVocabulary
from draftsmith.train.optim import training_bytes

sys.path.insert(0, str(Path(__file__).parent))
from markdown import fill, table

# width, vocabulary, blocks, attention heads, key-value heads, head_dim, intermediate, GB at bf16, parameters that a token uses
TARGETS = {
    "8 B": (4096, 151_936, 36, 32, 8, 128, 12_288, 16, 8e9),
    "70 B": (8192, 128_256, 80, 64, 8, 128, 28_672, 140, 70e9),
    "235 B": (4096, 151_936, 94, 64, 4, 128, 12_288, 470, 22e9),
}
TOKENS, DRAFT_VOCABULARY, ROLLOUTS = 100_000_000, 32_000, 7
# A stated rate, to be replaced by a measured one: 40 % of the 989 TFLOP/s (dense bf16) in the data sheet of an H100 SXM.
GPUS, FLOPS = 8, 0.4 * 989e12


def head_bytes(name: str) -> tuple[int, int]:
    """Parameters of an EAGLE head for a target, and bytes to train it: masters and gradients in fp32, one moment under Muon, two
    under AdamW."""
    width, vocabulary, blocks, heads, kv_heads, head_dim, intermediate, *_ = TARGETS[name]
    draft = DraftVocabulary(torch.arange(DRAFT_VOCABULARY), vocabulary)
    with torch.device("meta"):
        config = EagleConfig(
            kind="eagle3",
            width=width,
            target_width=width,
            target_vocabulary=vocabulary,
            draft_vocabulary=DRAFT_VOCABULARY,
            taps=choose_taps(blocks),
            layers=1,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate=intermediate,
            norm_eps=1e-6,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            context=4096,
            target_fingerprint="",
        )
        embedding = torch.nn.Embedding(vocabulary, width)
        head = EagleHead(config, draft, embedding)
    return sum(p.numel() for p in head.parameters()), training_bytes(head)


def figures() -> str:
    sizes, memory, times = [], [], []
    for name, (width, vocabulary, blocks, *_, weights, used) in TARGETS.items():
        for codec in STATE_CODECS:
            settings = CacheSettings.model_validate({"state_codec": codec, "distribution": "topk"})
            size = bytes_per_token(cache_fields(settings, width, vocabulary, blocks))
            sizes.append((name, codec, f"{size:,}", f"{size * TOKENS / 1e12:.2f} TB"))
        count, size = head_bytes(name)
        memory.append((name, f"{count / 1e6:,.0f} M", f"{size / 1e9:.1f} GB", f"{size / 8e9:.2f} GB", f"{weights} GB"))
        rates = GPUS * FLOPS / (2 * used), GPUS * FLOPS / (6 * count * ROLLOUTS)
        times.append((name, *(cell for rate in rates for cell in (f"{rate:,.0f}", f"{TOKENS / rate / 3600:.2f} h"))))
    tables = (
        table(("target", "codec of states", "bytes per token", "100 M tokens"), sizes),
        table(
            ("target", "head", "weights, gradients, moments, one rank", "per rank of 8, FSDP2", "target's weights"),
            memory,
        ),
        table(
            (
                "target",
                "tokens/s of the cache, computed",
                "100 M tokens",
                "tokens/s of the training, computed",
                "100 M tokens",
            ),
            times,
        ),
    )
    return "\n\n".join(tables)


if __name__ == "__main__":
    fill(Path("docs/scaling.md"), "figures", figures())
