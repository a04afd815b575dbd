"""The target: an LM with its tokenizer, loaded from a local folder or a hub name, frozen, identified by a fingerprint.

Knows files and tokenizers; knows nothing of caches on disk, drafts or decoding.
"""

import functools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import xxhash
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from draftsmith.errors import UserError, first_line
from draftsmith.models.lm import LanguageModel, refuse_unsupported

# Relative error of logits computed in two ways; the summation order differs, and in half precision the rounding too.
PROBE_ERROR = {torch.float32: 1e-3, torch.bfloat16: 0.1}
# Models with huge activations magnify rounding: in float32 so many times what it does to a model's own logits is no
# error, up to the last of these, beyond which it is not rounding: texts of a batch then change each other. Of
# SmolLM2-135M a tree's logits differ by 0.001 of their spread; a wrong mask or depth showed as 0.5 to 15 (there and
# on the demo's target).
ROUNDING, MOST_ROUNDING = 10.0, 0.005
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_taps(blocks: int, taps: Literal["auto"] | Sequence[int] = "auto") -> tuple[int, ...]:
    """Block outputs, counted from 0, that EAGLE-3 fuses.

    `auto` is EAGLE-3's {1, L//2 − 1, L − 4} where these are three rising blocks (L ≥ 8, and L = 7), and otherwise a low, a
    middle and a high block, or all blocks of a target with fewer than four. Raises UserError for taps out of order or range.
    """
    chosen: tuple[int, ...]
    if taps == "auto":
        chosen = (1, blocks // 2 - 1, blocks - 4)
        if not chosen[0] < chosen[1] < chosen[2]:
            low, high = min(1, max(blocks - 4, 0)), blocks - 2
            chosen = (low, (low + high) // 2, high) if blocks >= 4 else tuple(range(blocks))
    else:
        chosen = tuple(taps)
    if not chosen or list(chosen) != sorted(set(chosen)) or chosen[0] < 0 or chosen[-1] >= blocks:
        raise UserError(f"cache.taps: {list(chosen)} must be rising block numbers from 0 to {blocks - 1}")
    return chosen


class Target(LanguageModel):
    """The frozen model p that drafts are trained to imitate and that decides what is accepted."""

    def __init__(self, model: Any, tokenizer: Any = None, path: str = "") -> None:
        super().__init__(model.eval())
        self._tokenizer = tokenizer
        self.path = path
        if tokenizer is not None:
            self.usable = min(self.vocabulary, 1 + max(tokenizer.get_vocab().values()))
        self._check_conventions()

    def _check_conventions(self) -> None:
        """Refuse an architecture whose logits `head` does not reproduce, or whose attention cannot take a mask of ours."""
        kind, attention = self.config.model_type, getattr(self.config, "_attn_implementation", "sdpa")
        if attention not in ("sdpa", "eager"):
            raise UserError(
                f"{kind} with {attention} attention cannot verify token trees; load it with sdpa or eager attention"
            )
        if self.device.type == "meta":
            return
        try:
            head_error, tree_error, rounding = self._probe()
        except (
            TypeError,
            ValueError,
            RuntimeError,
            AttributeError,
            LookupError,
        ) as error:  # of code that we do not know
            raise UserError(
                f"{kind}: not supported, it does not take our cache and masks ({first_line(error)})"
            ) from error
        if not head_error <= PROBE_ERROR[torch.float32]:  # written so that NaN fails too
            raise UserError(
                f"{kind}: its logits are not its output head applied to its last state; it is not supported yet"
            )
        tolerance = PROBE_ERROR.get(self.dtype, PROBE_ERROR[torch.bfloat16])
        if self.dtype == torch.float32:
            tolerance = max(tolerance, min(ROUNDING * rounding, MOST_ROUNDING))
            if rounding > MOST_ROUNDING:
                raise UserError(
                    f"{kind}: not supported, a text gets other logits in a batch than alone (relative error {rounding:.2g}): drafts"
                    " would change what it says; load it without quantised activations"
                )
        if not tree_error <= tolerance:
            raise UserError(
                f"{kind}: not supported, a branch of a token tree gets other logits than alone (relative error {tree_error:.2g}):"
                " its layers do not go by attention mask and position ids"
            )

    @torch.no_grad()
    def _probe(self) -> tuple[float, float, float]:
        """How far the logits are from the model's own, relative to their spread: from `head`, of a tree behind a cache, and the
        model's own of a text alone from those of the same text in a batch, which should be rounding.

        The tree is a root with two children, one of which has a child, behind prefixes of 3 and 2 tokens in one batch.
        """
        lengths, branches = (3, 2), ((0, 1), (0, 2, 3))
        ids = torch.arange(14, device=self.device).reshape(2, 7) % self.vocabulary
        prefixes, trees = ids[:, :3], ids[:, 3:]
        alone = torch.zeros(
            4, 6, dtype=torch.long, device=self.device
        )  # each prefix with each branch, padded on the right
        places = [(row, branch) for row in range(2) for branch in branches]
        for at, (row, branch) in enumerate(places):
            whole = torch.cat([prefixes[row, : lengths[row]], trees[row, list(branch)]])
            alone[at, : len(whole)] = whole
        own, ours = self.model(alone).logits.float(), self.forward(alone).logits
        each = torch.cat([self.model(text[None]).logits.float() for text in alone])
        cache = self.new_cache(2, 7)
        self.forward(prefixes, cache=cache, want_logits=False)
        cache.set_lengths(torch.tensor(lengths, device=self.device))
        visible = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], device=self.device).bool()[
            None
        ]
        depths = torch.tensor([[0, 1, 1, 2]], device=self.device)
        tree = self.forward(trees, cache=cache, visible=visible, depths=depths).logits
        assert ours is not None
        assert tree is not None
        errors = [
            _relative(tree[row, list(branch)].float(), own[at, lengths[row] : lengths[row] + len(branch)])
            for at, (row, branch) in enumerate(places)
        ]
        # In half precision rounding may send a token to another expert: most nodes must agree, not all.
        together = torch.cat(errors)
        tree_error = together.max() if self.dtype == torch.float32 else together.median()
        return float(_relative(ours.float(), own).max()), float(tree_error), float(_relative(each, own).max())

    @classmethod
    def load(
        cls, path: str | Path, dtype: str = "float32", device: str = "cpu", trust_remote_code: bool = False
    ) -> "Target":
        """Load weights and tokenizer from a folder or hub name. Raises UserError when either cannot be used; no pickles."""
        name = str(path)
        model = load_model(name, dtype, trust_remote_code).to(device).requires_grad_(False)
        try:
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
        except (OSError, ValueError) as error:
            raise UserError(f"target.path: {name} has no usable tokenizer ({first_line(error)})") from error
        target = cls(model, tokenizer, name)
        if len(tokenizer) > target.vocabulary:
            raise UserError(
                f"{name}: its tokenizer has {len(tokenizer)} tokens, its output head only {target.vocabulary}"
            )
        return target

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    @property
    def tokenizer(self) -> Any:
        if self._tokenizer is None:
            raise UserError(f"target {self.path or type(self.model).__name__} has no tokenizer")
        return self._tokenizer

    @functools.cached_property
    def eos_ids(self) -> frozenset[int]:
        """Ids after which the target stops, from its generation config, else from its tokenizer."""
        configured = getattr(self.model.generation_config, "eos_token_id", None)
        if configured is None:
            configured = self._tokenizer.eos_token_id if self._tokenizer is not None else None
        ids = configured if isinstance(configured, list) else [configured]
        return frozenset(i for i in ids if i is not None)

    def fingerprint(self) -> str:
        """32 hex digits over every weight's name, type, shape and bytes, the configuration and the tokenizer."""
        return self._fingerprint

    @functools.cached_property
    def _fingerprint(self) -> str:
        hasher = xxhash.xxh3_128()
        for name, tensor in sorted(self.model.state_dict().items()):
            hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            hasher.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        # Paths and library versions may differ between two copies of the same model.
        config = {k: v for k, v in self.config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
        hasher.update(json.dumps(config, sort_keys=True, default=str).encode())
        if self._tokenizer is not None:
            hasher.update(json.dumps(sorted(self._tokenizer.get_vocab().items())).encode())
            hasher.update((getattr(self._tokenizer, "chat_template", None) or "").encode())
        return hasher.hexdigest()


def load_model(name: str, dtype: str = "float32", trust_remote_code: bool = False) -> Any:
    """The `transformers` causal LM at a folder or hub name, from safetensors only. Raises UserError in one line."""
    place = Path(name).expanduser()
    local = place.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
    if not name or (local and not place.exists()):
        raise UserError(f"{name or repr(name)}: no such folder; give a model's folder or a hub name")
    if place.is_file():
        raise UserError(f"{name}: is a file; give a model's folder or a hub name")
    if Path(name).is_dir() and not any(Path(name).glob("*.safetensors")):
        raise UserError(
            f"{name}: no *.safetensors in this folder; put the model's weights there or name another folder"
        )
    try:
        config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
        refuse_unsupported(config)  # before the weights are read
        if place.is_dir() and getattr(config, "num_hidden_layers", 0) > _tensors(place):  # hours, even without weights
            raise UserError(f"{name}/config.json: num_hidden_layers is more than its weights have; correct it")
        model, found = AutoModelForCausalLM.from_pretrained(
            name,
            config=config,
            dtype=DTYPES[dtype],
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # named below
        )
    except (
        OSError,
        ValueError,
        RuntimeError,
        LookupError,
        ArithmeticError,
        TypeError,
        AttributeError,
        SafetensorError,
    ) as error:
        raise UserError(
            f"{name}: not a usable model folder or hub name ({first_line(error)}); correct it, or give another"
        ) from error
    except StrictDataclassError as error:  # of a field's type; its first line says where in the library
        reason = " ".join(str(error).split())[-200:]
        raise UserError(f"{name}/config.json: has an impossible value ({reason}); correct it") from error
    if wrong := sorted(found["mismatched_keys"]):
        name_of, stored, expected = wrong[0]
        raise UserError(
            f"{name}: {name_of} has shape {tuple(stored)}, config.json says {tuple(expected)}; restore the one that is wrong"
        )
    # The library would fill missing weights with random numbers and go on.
    if missing := sorted(found["missing_keys"]):
        raise UserError(
            f"{name}: {len(missing)} weights of its configuration are missing, {missing[0]} first; complete the folder"
        )
    # Of a block that the configuration leaves out; other extras (a draft head, say) are none of our business.
    if left := sorted(key for key in found["unexpected_keys"] if re.search(r"\.(layers|h|blocks)\.\d+\.", f".{key}")):
        raise UserError(f"{name}: its configuration has no place for {left[0]}; mend num_hidden_layers in config.json")
    return model


def _tensors(folder: Path) -> int:
    """How many tensors a folder's safetensors files hold."""
    count = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as reader:
            count += len(reader.keys())
    return count


def _relative(ours: Tensor, own: Tensor) -> Tensor:
    """Largest difference of each position's logits [..., V] over their spread."""
    return (ours - own).abs().amax(-1).flatten() / own.std(-1).clamp_min(1e-6).flatten()
