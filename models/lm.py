"""A `transformers` causal LM behind one `forward`: logits, last state, taps; right-padded batches; KV cache; token trees.

The model is used as it comes: hooks read the taps, and nothing is patched but that on some CPUs its linear layers multiply the
other way round (`models/few_rows.py`). Conventions: `last` is the state after the final norm, so `head(last)` are the logits;
tap i is the residual-stream output of block i, counted from 0, before any final norm. Knows neither tokenizers nor files nor
which of its users is the target and which the draft.
"""

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from draftsmith.errors import UserError
from draftsmith.models.few_rows import few_rows_fast
from draftsmith.models.kv import KVCache, attention_mask

RUNNING_STATE = "its layers keep a running state that cannot be rolled back to an earlier token"
ALIBI = "its ALiBi biases go by place in the cache, where the nodes of a token tree stand side by side"
#: Architectures whose configuration has no field that gives them away.
UNSUPPORTED = {
    "bloom": ALIBI,
    "mpt": ALIBI,
    "rwkv": RUNNING_STATE,
    "xlstm": RUNNING_STATE,
    "gpt_neo": "its local layers count back by place in the cache, where the nodes of a token tree stand side by side",
}


@dataclass(frozen=True)
class LMOutput:
    """logits [B, n, V] (None when not asked for), last [B, n, W], taps [B, n, A, W] (None without taps)."""

    logits: Tensor | None
    last: Tensor
    taps: Tensor | None


class LanguageModel:
    """One causal LM. `model` is the `transformers` module, its weights untouched."""

    def __init__(self, model: Any) -> None:
        refuse_unsupported(model.config)
        few_rows_fast(model)
        self.model = model
        self.config = model.config.get_text_config()
        self.width: int = self.config.hidden_size
        self.blocks: int = self.config.num_hidden_layers
        self._head: Any = model.get_output_embeddings()
        self.vocabulary: int = self._head.weight.shape[0]
        self.usable = self.vocabulary  # ids from here on are padding that no tokenizer knows
        self.context: int = _context(self.config)
        self._body: nn.Module = model.base_model
        self.block_modules = _find_blocks(self._body, self.blocks)
        self._windows = _attention_windows(self.config)
        parameters = inspect.signature(self._body.forward).parameters
        # transformers 5.24 renamed the argument and wraps `forward`; older releases know only the first name.
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"

    @property
    def device(self) -> torch.device:
        return self._head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self._head.weight.dtype

    def only_tokens(self, logits: Tensor | None) -> Tensor:
        """The same logits [..., V], in place: no mass on rows of the head that only pad the vocabulary."""
        assert logits is not None
        if self.usable < self.vocabulary:
            logits[..., self.usable :] = float("-inf")
        return logits

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty cache for `batch` rows of at most `capacity` tokens each."""
        return KVCache(batch, capacity, self.blocks, self.device)

    @property
    def plain_head(self) -> Tensor | None:
        """The output head's weight [V, W] if logits are no more than last · weightᵀ; None if there is a bias, scale or cap."""
        module = self._head
        shaped = any(
            getattr(self.config, name, None) for name in ("logits_scaling", "logit_scale", "final_logit_softcapping")
        )
        return None if shaped or getattr(module, "bias", None) is not None else module.weight

    @property
    def plain_embedding(self) -> bool:
        """Whether a token's embedding is its row as it is stored, without a scale."""
        module = self.model.get_input_embeddings()
        return bool(torch.equal(module(torch.zeros(1, dtype=torch.long, device=self.device))[0], module.weight[0]))

    def head_rows(self, ids: Tensor) -> Tensor:
        """Rows [n, W] of the output head for these tokens with the model's own scale: last · rowsᵀ are their logits, but for a
        bias and a soft-cap."""
        return self._scaled(self._head.weight[ids.to(self.device)].detach())

    def head(self, last: Tensor) -> Tensor:
        """last [..., W] (after the final norm) → logits [..., V], with the model's own scale and soft-cap."""
        logits = self._scaled(self._head(last))
        if cap := getattr(self.config, "final_logit_softcapping", None):  # Gemma 2: cap · tanh(z / cap)
            logits = torch.tanh(logits / cap) * cap
        return logits

    def _scaled(self, values: Tensor) -> Tensor:
        """Logits, or the output head's rows, with the model's own scale."""
        if divisor := getattr(self.config, "logits_scaling", None):  # Granite
            values = values / divisor
        if factor := getattr(self.config, "logit_scale", None):  # Cohere
            values = values * factor
        return values

    def forward(
        self,
        ids: Tensor,
        taps: Sequence[int] = (),
        *,
        cache: KVCache | None = None,
        visible: Tensor | None = None,
        depths: Tensor | None = None,
        want_logits: bool = True,
    ) -> LMOutput:
        """Run the model over ids [B, n].

        Without a cache the rows start at position 0 and may be padded on the right: attention is causal, so padding
        changes nothing before it. With a cache the new tokens stand behind each row's uncommitted ones (`KVCache.hold`),
        or else behind its committed ones; as a tree if `visible` [B or 1, n, held + n] (new token i sees uncommitted token j: its
        ancestors and itself) and `depths` [B or 1, n] (position behind the committed ones) are given, as a chain otherwise.
        Nothing is committed: the caller does that.
        """
        arguments: dict[str, Any] = {"use_cache": False}
        if cache is not None:
            arguments = {
                "use_cache": True,
                self._cache_argument: cache,
                **self._tree_inputs(ids, cache, visible, depths),
            }
        kept: dict[int, Tensor] = {}
        hooks = [self.block_modules[i].register_forward_hook(_keep_output(kept, i)) for i in taps]
        try:
            last = self._body(input_ids=ids, **arguments).last_hidden_state
        finally:
            for hook in hooks:
                hook.remove()
        logits = self.head(last) if want_logits else None
        return LMOutput(logits, last, torch.stack([kept[i] for i in taps], dim=2) if taps else None)

    @functools.cached_property
    def final_norm(self) -> nn.Module:
        """The module that turns the last block's output into the last state, found by watching one pass. Raises UserError."""
        seen: list[tuple[nn.Module, Tensor, Tensor]] = []

        def watch(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            if inputs and isinstance(inputs[0], Tensor) and isinstance(output, Tensor):
                seen.append((module, inputs[0], output))

        hooks = [module.register_forward_hook(watch) for module in self._body.modules()]
        try:
            with torch.no_grad():
                out = self.forward(torch.zeros(1, 1, dtype=torch.long, device=self.device), (self.blocks - 1,))
        finally:
            for hook in hooks:
                hook.remove()
        assert out.taps is not None
        for module, given, output in reversed(seen):
            if torch.equal(given, out.taps[:, :, 0]) and torch.equal(output, out.last):
                return module
        raise UserError(
            f"{self.config.model_type}: its last state is not one module applied to its last block's output"
        )

    def _tree_inputs(
        self, ids: Tensor, cache: KVCache, visible: Tensor | None, depths: Tensor | None
    ) -> dict[str, Any]:
        batch, count = ids.shape
        if visible is None:
            visible = torch.ones(1, count, count, dtype=torch.bool, device=ids.device).tril()
        if depths is None:
            depths = torch.arange(count, device=ids.device)[None]
        positions = (cache.lengths[:, None] + depths).expand(batch, count)
        masks = {
            kind: attention_mask(cache, visible, positions, self.dtype, window)
            for kind, window in self._windows.items()
        }
        mask = masks if len(masks) > 1 else next(iter(masks.values()))
        return {"attention_mask": mask, "position_ids": positions}


def _keep_output(kept: dict[int, Tensor], block: int) -> Any:
    def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
        kept[block] = output[0] if isinstance(output, tuple) else output

    return hook


def _find_blocks(body: nn.Module, count: int) -> nn.ModuleList:
    """The list of the body's decoder blocks, whatever the architecture calls it."""
    for module in body.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise UserError(
        f"{type(body).__name__}: no list of {count} decoder blocks found; this architecture is not supported"
    )


def refuse_unsupported(config: Any) -> None:
    """Raise UserError, naming the architecture and why, if its configuration says that it cannot verify drafts exactly.

    A verified token may be dropped again, so every layer's state must be rolled back to any earlier token; keys and values can
    be, a running state (Mamba, linear attention, short convolutions, RWKV) cannot. What a configuration does not say, `Target`
    measures.
    """
    text = config.get_text_config()
    kind = text.model_type
    if config.is_encoder_decoder:
        raise UserError(f"{config.model_type}: an encoder-decoder is not supported; name a decoder-only causal LM")
    if reason := UNSUPPORTED.get(kind, ALIBI if getattr(text, "alibi", False) else ""):
        raise UserError(f"{kind}: not supported, {reason}; name another model")
    kinds = set(getattr(text, "layer_types", None) or [])
    if unknown := sorted(map(str, kinds - {"full_attention", "sliding_attention"})):
        raise UserError(
            f"{kind}: layers of kind {', '.join(unknown)} are not supported, only full and sliding-window attention can be"
            " masked for a token tree and rolled back here; name another model"
        )


def _context(config: Any) -> int:
    """Tokens that a text may have. RoPE of type longrope turns to other frequencies beyond its original length, which cached
    keys would not have: such a model is used up to there."""
    most = getattr(config, "max_position_embeddings", None) or 1 << 30
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [entry for entry in rope.values() if isinstance(entry, dict)]
    turns = [entry for entry in nested or [rope] if entry.get("rope_type") == "longrope"]
    return min([most, *(entry["original_max_position_embeddings"] for entry in turns)])


def _attention_windows(config: Any) -> dict[str, int | None]:
    """Window (None: all positions) of each kind of attention layer in the model, under the names that its masks go by."""
    window = getattr(config, "sliding_window", None)
    kinds = sorted(set(getattr(config, "layer_types", None) or []))
    if not kinds:
        return {"all": window if getattr(config, "use_sliding_window", True) else None}
    return {kind: window if kind == "sliding_attention" else None for kind in kinds}
