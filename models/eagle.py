"""EAGLE heads: one layer that drafts from the target's own hidden states.

EAGLE-1 (Li et al. 2024, arXiv 2401.15077; EAGLE-2 is the same weights with a dynamic tree): slot t joins the target's last state
h_t with the embedding of x_{t+1} and predicts h_{t+1}, which the target's own output head reads as the distribution of x_{t+2}.
EAGLE-3 (Li et al. 2025, arXiv 2503.01840): slot t joins the target's fused taps g_t with the embedding of x_{t+1}; the head's
state need not resemble anything of the target's, and the head has an output head of its own.

When drafting goes on, the head's own state stands in for the features that the target has not computed yet. One `step` serves
training and decoding; what differs is only the `Attend` that it is given, which owns the keys and values. Knows neither losses nor
caches on disk.

Deviations from EAGLE-3's paper, all of them those of its published code: token and feature are normed separately and concatenated
into a doubled-width attention input (the paper has one more linear layer there); the un-normed feature is the residual.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.gpt_neox.modeling_gpt_neox import (  # Llama's, for targets that turn a part of each head as well
    GPTNeoXRotaryEmbedding,
    apply_rotary_pos_emb,
)

from draftsmith.errors import UserError
from draftsmith.models.eagle_start import Start, Text, initialise
from draftsmith.models.few_rows import few_rows_fast
from draftsmith.models.heads import load_head, save_head
from draftsmith.models.target import Target
from draftsmith.models.vocabulary import DraftVocabulary

# attend(layer, query [B, heads, n, d], key [B, kv_heads, n, d], value) -> [B, heads, n, d]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


KINDS = ("eagle1", "eagle3")
INPUTS = ("shifted", "unshifted", "feature", "token")


@dataclass(frozen=True)
class EagleConfig:
    """The head's shape. RoPE settings are the target's (`transformers`' `rope_parameters`); target_fingerprint: of the model whose
    states it was made for ("": any of the right sizes).

    inputs: what a slot joins; "shifted" is EAGLE, the others are the steps of its paper's ablation (feature and x_t; feature alone;
    token alone). fc_bias: a bias in the linear layer before the first block. EAGLE-3.1 (arXiv 2605.09992): norm_taps norms each
    tap before fusion, norm_state feeds the normed state back. confidence: one more output, the prediction's expected acceptance.
    Of heads that others trained: norm_joined norms the concatenated taps at once, norm_residual makes the normed feature the
    residual.
    """

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
    inputs: str = "shifted"
    fc_bias: bool = False
    norm_taps: bool = False
    norm_state: bool = False
    confidence: bool = False
    norm_joined: bool = False
    norm_residual: bool = False

    def __post_init__(self) -> None:
        counts = ("width", "layers", "heads", "kv_heads", "head_dim", "intermediate", "context")
        wrong = [f"{name} {getattr(self, name)} is below 1" for name in counts if getattr(self, name) < 1]
        if not wrong and self.heads % self.kv_heads:
            wrong = [f"{self.heads} heads cannot share {self.kv_heads} heads of keys and values evenly"]
        if self.head_dim % 2:
            wrong.append(f"head_dim {self.head_dim} is odd, and RoPE turns pairs")
        if wrong:
            raise UserError(f"EAGLE head: impossible shape: {'; '.join(wrong)}")
        if sorted(set(self.taps)) != list(self.taps):
            raise UserError(f"EAGLE head: taps {list(self.taps)} do not rise; name each once, from the lowest block up")
        if self.kind not in KINDS or self.inputs not in INPUTS:
            raise UserError(f"EAGLE head: kind {self.kind!r} with inputs {self.inputs!r}; there are {KINDS}, {INPUTS}")
        if self.kind == "eagle1":
            own = self.width != self.target_width or self.draft_vocabulary != self.target_vocabulary
            if own or self.taps or self.norm_taps or self.norm_state or self.norm_joined or self.norm_residual:
                raise UserError(
                    "EAGLE-1 head: it imitates the target's last state and is read by the target's own output head, so it has the "
                    "target's width and vocabulary, no taps and no norms of its own"
                )


def rope_of(target: Target) -> dict[str, Any]:
    """The target's RoPE settings, complete in themselves; of several kinds of layer, those of its full-attention layers."""
    config = target.config
    parameters = dict(getattr(config, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0})
    parameters = dict(parameters.get("full_attention") or parameters)
    if parameters["rope_type"] in ("yarn", "longrope") and parameters.get("factor") is None:
        # Left out, it means this ratio, and the head's own context is not the target's.
        parameters["factor"] = config.max_position_embeddings / parameters["original_max_position_embeddings"]
    return parameters


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
        return self.down_proj(self.hidden(x))

    def hidden(self, x: Tensor) -> Tensor:
        """What the last projection reads."""
        return F.silu(self.gate_proj(x)) * self.up_proj(x)


class EagleLayer(nn.Module):
    """A decoder layer. EAGLE-3's first one attends over [norm(embedding), norm(feature)], EAGLE-1's over its input as it is, and
    later ones over norm(x)."""

    def __init__(self, config: EagleConfig, first: bool) -> None:
        super().__init__()
        joins = first and config.kind == "eagle3"
        self.input_layernorm: nn.Module = nn.Identity()  # of EAGLE-1's first layer: the fusion stands before it
        if joins or not first:
            self.input_layernorm = RMSNorm(config.target_width if joins else config.width, config.norm_eps)
        self.hidden_norm = RMSNorm(config.width, config.norm_eps) if joins else None
        self.self_attn = Attention(config, config.target_width + config.width if joins else config.width)
        self.post_attention_layernorm = RMSNorm(config.width, config.norm_eps)
        self.mlp = MLP(config.width, config.intermediate)
        self.norm_residual = config.norm_residual

    def forward(self, embedding: Tensor, x: Tensor, rope: tuple[Tensor, Tensor], layer: int, attend: Attend) -> Tensor:
        if self.hidden_norm is not None:
            feature = self.hidden_norm(x)
            inputs = torch.cat([self.input_layernorm(embedding), feature], dim=-1)
            x = feature if self.norm_residual else x
        else:
            inputs = self.input_layernorm(x)
        x = x + self.self_attn(inputs, rope, layer, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class EagleHead(nn.Module):
    """The head's trainable weights. The token embedding, and EAGLE-1's output head, are the target's, frozen, and not part of the
    checkpoint."""

    def __init__(self, config: EagleConfig, vocabulary: DraftVocabulary, target: Target) -> None:
        super().__init__()
        if vocabulary.size != config.draft_vocabulary or vocabulary.target_size != config.target_vocabulary:
            raise UserError("EAGLE head: the draft vocabulary does not fit the head's configuration")
        self.config = config
        self.vocabulary = vocabulary
        joined = len(config.taps) if config.taps else 2  # all taps of a slot, or EAGLE-1's embedding and feature
        self.fc = nn.Linear(joined * config.target_width, config.width, bias=config.fc_bias)
        self.fc_norm = nn.ModuleList(
            RMSNorm(config.target_width, config.norm_eps) for _ in config.taps if config.norm_taps
        )
        self.input_norm = RMSNorm(joined * config.target_width, config.norm_eps) if config.norm_joined else None
        self.layers = nn.ModuleList(EagleLayer(config, first=i == 0) for i in range(config.layers))
        self.norm = RMSNorm(config.width, config.norm_eps) if config.kind == "eagle3" else None
        self.lm_head = nn.Linear(config.width, vocabulary.size, bias=False) if config.kind == "eagle3" else None
        self.confidence_head = nn.Linear(config.width, 1) if config.confidence else None
        self.rotary = GPTNeoXRotaryEmbedding(
            LlamaConfig(
                hidden_size=config.heads * config.head_dim,
                num_attention_heads=config.heads,
                head_dim=config.head_dim,
                max_position_embeddings=config.context,
                rope_parameters=config.rope_parameters,
            )
        )
        if target.device.type == "cpu":
            few_rows_fast(self)
        self._target = [target]  # in a list, so that it is not registered: its weights are its own

    @property
    def first_layer(self) -> EagleLayer:
        return cast(EagleLayer, self.layers[0])

    def fuse(self, features: Tensor) -> Tensor:
        """The target's taps [B, n, A, W] → g [B, n, H], the feature of rollout step 0; for EAGLE-1 its last states [B, n, W]
        are that feature. Raises UserError on a misfit."""
        config = self.config
        expected = (len(config.taps), config.target_width) if config.taps else (config.target_width,)
        if features.shape[2:] != expected:
            made_for = f"{len(config.taps)} taps of width" if config.taps else "last states of width"
            raise UserError(f"EAGLE head: made for {made_for} {config.target_width}, given {tuple(features.shape[2:])}")
        return self.fc(self.joined(features)) if config.taps else features

    def joined(self, taps: Tensor) -> Tensor:
        """What EAGLE-3 fuses: taps [..., A, W] side by side, [..., A · W], normed if the config says so."""
        if self.input_norm is not None:
            taps = self.input_norm(taps.flatten(-2)).view_as(taps)
        if self.fc_norm:
            taps = torch.stack([norm(taps[..., i, :]) for i, norm in enumerate(self.fc_norm)], dim=-2)
        return taps.flatten(-2)

    def step(self, tokens: Tensor, state: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """One draft step for n slots.

        tokens [B, n]: the token that each slot joins, x_{t+1+k} at rollout step k (x_{t+k} if the config's inputs are "unshifted").
        state [B, n, H]: the feature at step 0, after that the slot's own output of step k − 1. positions [B, n]: t + k. Returns the
        next state [B, n, H]; `logits` turns it into the prediction of x_{t+2+k}.
        """
        with torch.no_grad():
            embedding = self._target[0].model.get_input_embeddings()(tokens).to(state.dtype)
        if self.config.inputs == "feature":
            embedding = torch.zeros_like(embedding)
        elif self.config.inputs == "token":
            state = torch.zeros_like(state)
        if self.config.kind == "eagle1":
            state = self.fc(torch.cat([embedding, state], dim=-1))
        rope = self.rotary(state, positions)
        for i, layer in enumerate(self.layers):
            state = layer(embedding, state, rope, i, attend)
        return self.norm(state) if self.norm is not None and self.config.norm_state else state

    def normed(self, state: Tensor) -> Tensor:
        """state [..., H] → what the output head reads."""
        return state if self.norm is None or self.config.norm_state else self.norm(state)

    def logits(self, state: Tensor) -> Tensor:
        """state [..., H] → draft logits [..., V_d]."""
        if self.lm_head is None:
            return self._target[0].head(state)
        return self.lm_head(self.normed(state))

    def confidence(self, state: Tensor) -> Tensor:
        """state [..., H] → logit [...] of the expected acceptance Σ min(p, q) of the prediction that `logits` makes of it. The
        state gets no gradient: confidence watches the draft and does not shape it. Raises UserError without such an output."""
        if self.confidence_head is None:
            raise UserError("EAGLE head: it has no confidence output; train it with confidence above 0")
        return self.confidence_head(self.normed(state).detach()).squeeze(-1)

    def save(self, folder: Path) -> None:
        """Write `config.json` and `model.safetensors`; nothing of the target's is in them. Each file is atomic."""
        save_head(self, self.config, self.vocabulary, folder)

    @classmethod
    def load(cls, folder: Path, target: Target) -> "EagleHead":
        """Read a head and attach it to its target. Raises UserError naming what is missing, extra or of another shape."""
        return load_head(folder, EagleConfig, lambda config, vocabulary: cls(config, vocabulary, target), target)


def head_config(
    target: Target,
    taps: Sequence[int],
    vocabulary: DraftVocabulary,
    *,
    kind: str = "eagle3",
    width: int | None = None,
    layers: int = 1,
    kv_heads: int | None = None,
    intermediate: int | None = None,
    **switches: Any,
) -> EagleConfig:
    """The shape of a head for this target: of its width, heads and intermediate width unless given. switches: further fields of
    `EagleConfig`. Raises UserError for impossible shapes."""
    source = target.config
    head_dim = getattr(source, "head_dim", None) or target.width // source.num_attention_heads
    width = width or target.width
    heads = source.num_attention_heads if width == target.width else max(1, width // head_dim)
    same = getattr(source, "num_key_value_heads", None) or source.num_attention_heads
    return EagleConfig(
        kind=kind,
        width=width,
        target_width=target.width,
        target_vocabulary=target.vocabulary,
        draft_vocabulary=vocabulary.size,
        taps=tuple(taps) if kind == "eagle3" else (),
        layers=layers,
        heads=heads,
        kv_heads=kv_heads or (same if heads % same == 0 else heads),
        head_dim=head_dim,
        intermediate=intermediate or getattr(source, "intermediate_size", None) or 4 * target.width,
        norm_eps=getattr(source, "rms_norm_eps", 1e-6),
        rope_parameters=rope_of(target),
        context=target.context,
        target_fingerprint=target.fingerprint(),
        **switches,
    )


def new_eagle_head(
    target: Target,
    taps: Sequence[int],
    vocabulary: DraftVocabulary,
    *,
    head_from_target: bool = True,
    start: Start | None = None,
    texts: Iterable[Text] = (),
    seed: int = 0,
    **shape: Any,
) -> EagleHead:
    """A fresh head on the target's device. shape: as in `head_config`; the others: as in `initialise`, which names the errors."""
    head = EagleHead(head_config(target, taps, vocabulary, **shape), vocabulary, target)
    initialise(head, target, head_from_target=head_from_target, start=start, texts=texts, seed=seed)
    return head.to(target.device)
