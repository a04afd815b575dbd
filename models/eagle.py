"""EAGLE-3: a one-layer head that drafts from the target's own hidden states (Li et al. 2025, arXiv 2503.01840).

Slot t joins the target's fused taps g_t with the embedding of x_{t+1} and predicts x_{t+2}. When drafting goes on, the head's
own state stands in for the features that the target has not computed yet. One `step` serves training and decoding; what
differs is only the `Attend` that it is given, which owns the keys and values. Knows neither losses nor caches on disk.

Deviations from the paper, all of them those of its published code: token and feature are normed separately and concatenated
into a doubled-width attention input (the paper has one more linear layer there); the un-normed feature is the residual.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from draftsmith.errors import UserError
from draftsmith.files import publish, publish_json
from draftsmith.models.target import Target
from draftsmith.models.vocabulary import DraftVocabulary

# With this scale a slot's score for itself is 1.5² · √head_dim, far above those of other tokens.
SELF_ATTENTION = 1.5

# attend(layer, query [B, heads, n, d], key [B, kv_heads, n, d], value) -> [B, heads, n, d]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class EagleConfig:
    """The head's shape. RoPE settings are the target's (`transformers`' `rope_parameters`); target_fingerprint: of the model whose
    states it was made for ("": any of the right sizes)."""

    kind: str
    width: int
    target_width: int
    target_vocabulary: int
    draft_vocabulary: int
    taps: tuple[int, ...]
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    norm_eps: float
    rope_parameters: dict[str, Any]
    context: int
    target_fingerprint: str = ""

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads or self.head_dim % 2 or min(self.width, self.layers, self.intermediate) < 1:
            raise UserError(f"EAGLE head: impossible shape {asdict(self)}")


def rope_of(target: Target) -> dict[str, Any]:
    """The target's RoPE settings; for targets with several kinds of layer, those of its full-attention layers."""
    parameters = dict(
        getattr(target.config, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0}
    )
    return dict(parameters.get("full_attention") or parameters)


class RMSNorm(nn.Module):
    """x / √(mean x² + ε) · gain, computed in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps).to(x.dtype)


class Attention(nn.Module):
    """Multi-head (grouped-query) attention whose keys and values live in the caller's `Attend`."""

    def __init__(self, config: EagleConfig, input_width: int) -> None:
        super().__init__()
        self.config = config
        self.q_proj = nn.Linear(input_width, config.heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(input_width, config.kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(input_width, config.kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.heads * config.head_dim, config.width, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], layer: int, attend: Attend) -> Tensor:
        batch, count, _ = x.shape
        split = (batch, count, -1, self.config.head_dim)
        query, key = self.q_proj(x).view(split).transpose(1, 2), self.k_proj(x).view(split).transpose(1, 2)
        value = self.v_proj(x).view(split).transpose(1, 2)
        query, key = apply_rotary_pos_emb(query, key, *rope)
        return self.o_proj(attend(layer, query, key, value).transpose(1, 2).reshape(batch, count, -1))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, intermediate, bias=False)
        self.up_proj = nn.Linear(width, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class EagleLayer(nn.Module):
    """A decoder layer. The first one attends over [norm(embedding), norm(feature)]; later ones over norm(x) alone."""

    def __init__(self, config: EagleConfig, first: bool) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.target_width if first else config.width, config.norm_eps)
        self.hidden_norm = RMSNorm(config.width, config.norm_eps) if first else None
        self.self_attn = Attention(config, config.target_width + config.width if first else config.width)
        self.post_attention_layernorm = RMSNorm(config.width, config.norm_eps)
        self.mlp = MLP(config.width, config.intermediate)

    def forward(self, embedding: Tensor, x: Tensor, rope: tuple[Tensor, Tensor], layer: int, attend: Attend) -> Tensor:
        if self.hidden_norm is not None:
            inputs = torch.cat([self.input_layernorm(embedding), self.hidden_norm(x)], dim=-1)
        else:
            inputs = self.input_layernorm(x)
        x = x + self.self_attn(inputs, rope, layer, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class EagleHead(nn.Module):
    """The head's trainable weights. The token embedding is the target's, frozen, and not part of the checkpoint."""

    def __init__(self, config: EagleConfig, vocabulary: DraftVocabulary, embedding: nn.Module) -> None:
        super().__init__()
        if vocabulary.size != config.draft_vocabulary or vocabulary.target_size != config.target_vocabulary:
            raise UserError("EAGLE head: the draft vocabulary does not fit the head's configuration")
        self.config = config
        self.vocabulary = vocabulary
        self.fc = nn.Linear(len(config.taps) * config.target_width, config.width, bias=False)
        self.layers = nn.ModuleList(EagleLayer(config, first=i == 0) for i in range(config.layers))
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.lm_head = nn.Linear(config.width, config.draft_vocabulary, bias=False)
        self.rotary = LlamaRotaryEmbedding(
            LlamaConfig(
                hidden_size=config.heads * config.head_dim,
                num_attention_heads=config.heads,
                head_dim=config.head_dim,
                max_position_embeddings=config.context,
                rope_parameters=config.rope_parameters,
            )
        )
        self._embedding = [embedding]  # in a list, so that it is not registered: its weights belong to the target

    @property
    def first_layer(self) -> EagleLayer:
        return cast(EagleLayer, self.layers[0])

    def fuse(self, taps: Tensor) -> Tensor:
        """The target's taps [B, n, A, W] → g [B, n, H], the feature of rollout step 0. Raises UserError on a misfit."""
        if taps.shape[2:] != (len(self.config.taps), self.config.target_width):
            raise UserError(
                f"EAGLE head: made for {len(self.config.taps)} taps of width {self.config.target_width}, "
                f"given {tuple(taps.shape[2:])}"
            )
        return self.fc(taps.flatten(2))

    def step(self, tokens: Tensor, state: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One draft step for n slots.

        tokens [B, n]: the token that each slot joins, x_{t+1+k} at rollout step k. state [B, n, H]: g_t at step 0, after that
        the slot's own output of step k − 1. positions [B, n]: t + k. Returns the next state [B, n, H], before the final
        norm; `logits` turns it into the prediction of x_{t+2+k}.
        """
        with torch.no_grad():
            embedding = self._embedding[0](tokens).to(state.dtype)
        rope = self.rotary(state, positions)
        for i, layer in enumerate(self.layers):
            state = layer(embedding, state, rope, i, attend)
        return state

    def logits(self, state: Tensor) -> Tensor:
        """state [..., H] → draft logits [..., V_d]."""
        return self.lm_head(self.norm(state))

    def save(self, folder: Path) -> None:
        """Write `config.json` and `model.safetensors`; nothing of the target's is in them. Each file is atomic."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {k: v.detach().contiguous().clone() for k, v in self.state_dict().items()}
        tensors |= {"d2t": self.vocabulary.d2t, "t2d": self.vocabulary.t2d}
        publish(folder / "model.safetensors", lambda path: save_file(tensors, path, metadata={"format": "pt"}))
        publish_json(folder / "config.json", asdict(self.config))

    @classmethod
    def load(cls, folder: Path, target: Target) -> "EagleHead":
        """Read a head and attach it to its target. Raises UserError naming what is missing, extra or of another shape."""
        try:
            raw = json.loads((folder / "config.json").read_text())
            config = EagleConfig(**{**raw, "taps": tuple(raw["taps"])})
            tensors = load_file(folder / "model.safetensors")
            d2t, _ = tensors.pop("d2t"), tensors.pop("t2d")
        except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
            raise UserError(
                f"{folder}: not a readable EAGLE head ({error}); make it again or name another folder"
            ) from error
        if (config.target_width, config.target_vocabulary) != (target.width, target.vocabulary):
            raise UserError(
                f"{folder}: made for a target of width {config.target_width} and {config.target_vocabulary} tokens, "
                f"not {target.width} and {target.vocabulary}"
            )
        if config.target_fingerprint not in ("", target.fingerprint()):
            raise UserError(
                f"{folder}: made for target {config.target_fingerprint}, not {target.fingerprint()}; train it again"
            )
        try:
            vocabulary = DraftVocabulary(d2t + torch.arange(len(d2t)), config.target_vocabulary)
            head = cls(config, vocabulary, target.model.get_input_embeddings())
        except (
            StrictDataclassError,
            RuntimeError,
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            ZeroDivisionError,
        ) as error:
            raise UserError(
                f"{folder}/config.json: not a possible head ({str(error).splitlines()[0]}); restore it"
            ) from error
        expected = {k: v.shape for k, v in head.state_dict().items()}
        found = {k: v.shape for k, v in tensors.items()}
        if expected != found:
            wrong = sorted(k for k in expected.keys() | found.keys() if expected.get(k) != found.get(k))
            raise UserError(f"{folder}/model.safetensors: missing, extra or of another shape: {', '.join(wrong)}")
        head.load_state_dict(tensors)
        head = head.to(target.device)
        for parameter in head.parameters():  # weights alone: RoPE's frequencies lose whole turns in half precision
            parameter.data = parameter.data.to(target.dtype)
        return head


def new_eagle_head(
    target: Target,
    taps: Sequence[int],
    vocabulary: DraftVocabulary,
    *,
    layers: int = 1,
    kv_heads: int | None = None,
    intermediate: int | None = None,
    head_from_target: bool = True,
    sample_taps: Tensor | None = None,
    seed: int = 0,
) -> EagleHead:
    """A fresh head of the target's width, on the target's device.

    Weights are N(0, 0.02); the output head starts from the target's
    rows for the draft's tokens (`head_from_target`), which is worth more than any choice of loss at small budgets; the layer starts
    from the embedding (`start_from_embedding`) if `sample_taps` [n, A, W] are given and head_dim · heads is the width.
    """
    source = target.config
    heads = source.num_attention_heads
    config = EagleConfig(
        kind="eagle3",
        width=target.width,
        target_width=target.width,
        target_vocabulary=target.vocabulary,
        draft_vocabulary=vocabulary.size,
        taps=tuple(taps),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads or getattr(source, "num_key_value_heads", None) or heads,
        head_dim=getattr(source, "head_dim", None) or target.width // heads,
        intermediate=intermediate or getattr(source, "intermediate_size", None) or 4 * target.width,
        norm_eps=getattr(source, "rms_norm_eps", 1e-6),
        rope_parameters=rope_of(target),
        context=target.context,
        target_fingerprint=target.fingerprint(),
    )
    head = EagleHead(config, vocabulary, target.model.get_input_embeddings())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 0.02, generator=generator)
        if head_from_target:
            rows = target.model.get_output_embeddings().weight[vocabulary.target_ids.to(target.device)].float().cpu()
            head.lm_head.weight.copy_(rows)
    if sample_taps is not None and config.heads * config.head_dim == target.width:
        start_from_embedding(head, sample_taps)
    return head.to(target.device)


@torch.no_grad()
def start_from_embedding(head: EagleHead, taps: Tensor) -> None:
    """Make an untrained head predict, at every rollout step, from the joined token alone: as its output head reads the embedding.

    The head has no residual path from the embedding: it must learn to carry it through attention, which takes most of a small
    training budget. So attention starts by looking at its own slot (query and key are one map of the normed embedding, and a slot
    matches itself best), by passing the embedding on, and by taking the incoming feature off the residual, with features of rms 1:
    x = g + (norm(e) − norm(g)) = norm(e), whose rms is 1 again. Value and output projection are the leading right singular vectors
    of the output head: all of them if there are as many value dimensions as the width.

    taps: [n, A, W], a sample of the target's, which sets the scale of the features.
    """
    config, attention = head.config, head.first_layer.self_attn
    head.fc.weight /= head.fuse(taps[None]).pow(2).mean().sqrt()
    dims, rows = config.kv_heads * config.head_dim, head.lm_head.weight
    if dims > min(rows.shape):
        raise UserError(
            f"EAGLE head: {dims} value dimensions need a draft vocabulary of at least as many tokens, not {len(rows)}"
        )
    # Eigenvectors of WᵀW, largest first: the right singular vectors, without decomposing a matrix as tall as the vocabulary.
    basis = torch.linalg.eigh(rows.T @ rows).eigenvectors.flip(1)[:, :dims].T
    embedding, feature = slice(0, config.target_width), slice(config.target_width, None)
    groups = config.heads // config.kv_heads
    queries = basis.view(config.kv_heads, 1, config.head_dim, -1).expand(-1, groups, -1, -1).reshape(-1, config.width)
    attention.q_proj.weight[:, embedding] += SELF_ATTENTION * queries
    attention.k_proj.weight[:, embedding] += SELF_ATTENTION * basis
    attention.v_proj.weight[:, embedding] += basis
    attention.v_proj.weight[:, feature] -= basis
    attention.o_proj.weight += queries.T / groups
