"""Names of a head's tensors: ours to an engine's and back. Knows no shapes and no values."""

import re
from collections.abc import Iterable

from draftsmith.models.serving.layouts import LAYOUTS

#: Other projects' spellings, as (pattern, ours), applied in this order: prefixes of a wrapping module, SafeAILab's and SGLang's
#: only layer, TensorRT-LLM's numbered ones, SGLang's earlier names of the norms per state, Medusa in vLLM and in its own project.
ALIASES = (
    (r"^(?:model|draft_model|medusa_heads)\.", ""),
    (r"^midlayer\.(\d+)\.", r"layers.\1."),
    (r"^midlayer\.", "layers.0."),
    (r"^layers\.([1-9]\d*)\.hidden_norm\.", r"layers.\1.input_layernorm."),
    (r"^aux_norm_low\.", "fc_norm.0."),
    (r"^aux_norm_mid\.", "fc_norm.1."),
    (r"^aux_norm_high\.", "fc_norm.2."),
    (r"^blocks\.(\d+)\.layers\.0\.", r"blocks.\1."),
    (r"^(\d+)\.0\.linear\.", r"blocks.\1."),
    (r"^(\d+)\.1\.weight$", r"lm_heads.\1.weight"),
)


def engine_name(name: str, fmt: str, kind: str, layers: int = 1) -> str:
    """The name of one of our tensors in an engine's folder."""
    layout = LAYOUTS[fmt, kind]
    if kind == "medusa":
        return re.sub(r"^blocks\.(\d+)\.", r"blocks.\1.layers.0.", name)
    if layers == 1:
        name = re.sub(r"^layers\.0\.", f"{layout.single}.", name)
    return re.sub(r"^(layers\.[1-9]\d*)\.input_layernorm\.", rf"\1.{layout.later_norm}.", name)


def our_name(name: str) -> str:
    """Our name of a tensor in somebody else's folder; unknown names stay as they are."""
    for pattern, ours in ALIASES:
        name = re.sub(pattern, ours, name)
    return name


def their_name(name: str, others: Iterable[str]) -> str:
    """How a folder would spell a tensor of ours that it lacks, going by the names that it has."""
    others = list(others)
    if any(other.startswith("midlayer.") for other in others):
        name = re.sub(r"^layers\.0\.", "midlayer.", name)
    if any(re.match(r"blocks\.\d+\.layers\.", other) for other in others):
        name = re.sub(r"^blocks\.(\d+)\.", r"blocks.\1.layers.0.", name)
    if any(re.match(r"layers\.[1-9]\d*\.hidden_norm\.", other) for other in others):
        name = re.sub(r"^(layers\.[1-9]\d*)\.input_layernorm\.", r"\1.hidden_norm.", name)
    return name
