"""The draft LM: any small causal LM that speaks the target's tokens; cut out of the target, built from scratch with or without
the target's embedding and head, or read from a checkpoint of the same tokenizer.

Saved as an ordinary `transformers` folder, tokenizer included, so that every engine can serve it. Knows nothing of training.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from draftsmith.errors import UserError, first_line
from draftsmith.files import publish_files
from draftsmith.models.lm import LanguageModel
from draftsmith.models.target import Target, load_model

Shape = str | Mapping[str, int]
#: Named shapes: the share of the target's width, heads, feed-forward width and blocks that the draft has.
SHAPES = {"half": 1 / 2, "quarter": 1 / 4, "eighth": 1 / 8}
#: Lists of a configuration that say something of each block, in their order.
PER_BLOCK = ("layer_types", "mlp_layer_types", "no_rope_layers")
OTHERS = "name other blocks, or start from scratch"
PROBE = 8  # tokens
ROWS_AT_ONCE = 1 << 14  # of a vocabulary in one product: 0.6 GB in float64 at a width of 5,120


class DraftLM(LanguageModel):
    """The small model q."""

    @classmethod
    def from_target_blocks(
        cls, target: Target, blocks: Sequence[int], head: Literal["copied", "shared"] = "copied"
    ) -> "DraftLM":
        """The target with only these of its blocks, in this order; blocks and final norm are copies.

        head "copied": so are embedding and output head, and they are trained. "shared": they stay the target's own tensors,
        frozen. Raises UserError for blocks that the target does not have, and for those that are another thing at another place.
        """
        if not blocks or any(not 0 <= i < target.blocks for i in blocks):
            raise UserError(
                f"distill.blocks: {list(blocks)} must name blocks from 0 to {target.blocks - 1} of the target"
            )
        model = _build(target, {"num_hidden_layers": len(blocks)}, blocks)
        source = target.model.state_dict()
        number = dict(enumerate(blocks))
        origin = {name: _renumber(name, number) for name in model.state_dict()}
        if missing := [name for name in origin.values() if name not in source]:
            raise UserError(f"distill.blocks: {list(blocks)} need {missing[0]}, which the target has not; {OTHERS}")
        model.load_state_dict({name: source[old].clone() for name, old in origin.items()})
        if head == "shared":
            _set_ends(model, *_ends(target.model))
            _freeze_ends(model)
        draft = cls(model).of(target)
        if list(blocks) == sorted(set(blocks)) and target.device.type != "meta" and not _runs(draft, target, blocks):
            raise UserError(
                f"distill.blocks: {list(blocks)} compute something else in a {target.config.model_type} draft, where their"
                f" places change what they do; {OTHERS}"
            )
        return draft

    @classmethod
    def from_scratch(cls, target: Target, shape: Shape, seed: int) -> "DraftLM":
        """A fresh model of the target's architecture: some sizes changed (`transformers` config names), or one of `SHAPES`.

        Raises UserError for sizes that do not go together: some configurations are only found impossible by running them.
        """
        changes = sizes(target, shape)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            draft = cls(_build(target, changes, None)).of(target)
        if target.device.type != "meta":
            try:
                with torch.no_grad():
                    draft.forward(torch.zeros(1, PROBE, dtype=torch.long, device=target.device))
            except RuntimeError as error:
                raise _impossible(changes, error) from error
        return draft

    @classmethod
    def narrowed(
        cls, target: Target, shape: Shape, seed: int, head: Literal["copied", "shared"] = "copied"
    ) -> "DraftLM":
        """A fresh body narrower than the target, between the target's embedding and head projected to its width w.

        The projection of a matrix E [V, W] is E R, R [W, w] its first right singular vectors: of all matrices of rank w, E R Rᵀ
        is the nearest to E (Eckart and Young). It is folded into the draft's own [V, w] matrices, so that any engine loads
        them. head "copied": they are trained on; "shared": they stay as they are. Raises UserError unless w < W.
        """
        draft = cls.from_scratch(target, shape, seed)
        if draft.width >= target.width:
            raise UserError(
                f"distill.shape: a narrow start is narrower than its target: width {draft.width} is not below {target.width}"
            )
        embedding, output = _ends(target.model)
        narrow = project(embedding, draft.width)
        tied = getattr(draft.config, "tie_word_embeddings", False) or output is embedding
        _set_ends(draft.model, narrow, narrow if tied else project(output, draft.width))
        if head == "shared":
            _freeze_ends(draft.model)
        return draft

    @classmethod
    def load(cls, folder: str | Path, target: Target) -> "DraftLM":
        """Read a draft of `target` from a folder or hub name; its rows beyond the tokenizer's are padding, made to match.

        Raises UserError for missing tensors, for another tokenizer (the first difference is named), and
        for fewer rows than the tokenizer has tokens.
        """
        name = str(folder)
        model = load_model(name, str(target.dtype).removeprefix("torch."))
        if target.has_tokenizer:
            check_tokenizer(name, target)
        return cls(padded_to(model.to(target.device), target, name)).of(target)

    @classmethod
    def shape_of(cls, config: Any, target: Target) -> "DraftLM":
        """A draft of this `transformers` configuration as `load` would make it, without weights (on torch's meta device)."""
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
            model.resize_token_embeddings(target.vocabulary, mean_resizing=False)
            return cls(model).of(target)

    def of(self, target: Target) -> "DraftLM":
        """This draft, told which of its rows are tokens of the target."""
        self.usable = min(target.usable, self.vocabulary)
        return self

    def save(self, folder: Path, target: Target) -> None:
        """Write weights, configuration and the target's tokenizer as a `transformers` folder. Each file is atomic."""

        def write(partial: Path) -> None:
            self.model.save_pretrained(partial)
            target.tokenizer.save_pretrained(partial)

        publish_files(folder, write)


def sizes(target: Target, shape: Shape) -> dict[str, int]:
    """A shape as sizes under the names of the target's architecture. Raises UserError for what is no size of it."""
    known = target.config.to_dict()
    # GPT-2 calls its hidden_size n_embd: both names are taken.
    other = getattr(target.config, "attribute_map", {})
    if isinstance(shape, str):
        if shape not in SHAPES:
            raise UserError(f"distill.shape: no shape {shape!r}; there are {', '.join(SHAPES)}, or give sizes")
        return {other.get(name, name): size for name, size in _scaled(target, SHAPES[shape]).items()}
    chosen = {other.get(name, name): size for name, size in shape.items()}
    if wrong := [name for name in chosen if name not in known or name == "vocab_size"]:
        raise UserError(
            f"distill.shape: {wrong[0]} is no size of a {target.config.model_type} draft that can be chosen"
        )
    return chosen


def _scaled(target: Target, share: float) -> dict[str, int]:
    """Sizes of a draft that is `share` of its target in width and in depth, with heads as wide as the target's."""
    config = target.config
    heads = max(1, round(config.num_attention_heads * share))
    found = {
        "num_hidden_layers": max(1, round(config.num_hidden_layers * share)),
        "num_attention_heads": heads,
        "hidden_size": max(1, config.hidden_size // config.num_attention_heads) * heads,
    }
    if getattr(config, "num_key_value_heads", None):
        wanted = max(1, round(config.num_key_value_heads * share))
        found["num_key_value_heads"] = max(n for n in range(1, wanted + 1) if heads % n == 0)
    if getattr(config, "intermediate_size", None):
        found["intermediate_size"] = max(1, round(config.intermediate_size * share))
    return found


def project(matrix: Tensor, width: int) -> Tensor:
    """[V, W] → [V, width]: its rows in the coordinates of its first `width` right singular vectors."""
    if matrix.device.type == "meta":
        return matrix.new_empty(matrix.shape[0], width)
    gram = torch.zeros(matrix.shape[1], matrix.shape[1], dtype=torch.float64, device=matrix.device)
    for rows in matrix.detach().split(ROWS_AT_ONCE):
        gram += rows.double().mT @ rows.double()
    # Eigenvectors of EᵀE, largest last, are E's right singular vectors; W × W is small where V × W is not.
    vectors = torch.linalg.eigh(gram).eigenvectors[:, -width:].flip(1)
    return (matrix.detach() @ vectors.to(matrix.dtype)).contiguous()


def check_tokenizer(name: str, target: Target) -> None:
    """Raises UserError unless the tokenizer at `name` gives every id the token that the target's gives it."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise UserError(f"{name}: the draft has no usable tokenizer ({first_line(error)})") from error
    ours, theirs = ({i: token for token, i in t.get_vocab().items()} for t in (tokenizer, target.tokenizer))
    for i in sorted(ours.keys() | theirs.keys()):
        if ours.get(i) != theirs.get(i):
            said = [repr(tokens[i]) if i in tokens else "nothing" for tokens in (ours, theirs)]
            raise UserError(
                f"{name}: another tokenizer than the target's: id {i} is {said[0]} in the draft's and {said[1]} in the"
                " target's; take a draft of the target's family"
            )


def padded_to(model: Any, target: Target, name: str) -> Any:
    """`model` with as many rows in embedding and head as the target. Rows beyond the tokenizer's are never emitted."""
    rows = model.get_output_embeddings().weight.shape[0]
    if rows < target.usable:
        raise UserError(f"{name}: the draft has {rows} tokens, the target's tokenizer {target.usable}")
    if rows == target.vocabulary:
        return model
    model.resize_token_embeddings(target.vocabulary, mean_resizing=False)
    with torch.no_grad():
        for module in (model.get_input_embeddings(), model.get_output_embeddings()):
            module.weight[rows:] = 0.0  # the library leaves random numbers there
    return model


def _ends(model: Any) -> tuple[nn.Parameter, nn.Parameter]:
    return model.get_input_embeddings().weight, model.get_output_embeddings().weight


def _set_ends(model: Any, embedding: Tensor, output: Tensor) -> None:
    """Give the model these matrices, uncopied where its dtype is theirs, as its own parameters: converting it converts no other."""
    first = nn.Parameter(embedding.detach().to(model.dtype))
    tied = output is embedding or getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    model.get_input_embeddings().weight = first
    model.get_output_embeddings().weight = first if tied else nn.Parameter(output.detach().to(model.dtype))


def _freeze_ends(model: Any) -> None:
    for parameter in _ends(model):
        parameter.requires_grad_(False)


def _build(target: Target, changes: Mapping[str, int], blocks: Sequence[int] | None) -> Any:
    values: dict[str, Any] = {**target.config.to_dict(), **changes}
    count = getattr(target.config, "attribute_map", {}).get("num_hidden_layers", "num_hidden_layers")
    kept = range(changes.get(count, target.blocks)) if blocks is None else blocks
    try:
        for name in PER_BLOCK:
            if said := getattr(target.config, name, None):
                values[name] = [said[i] for i in kept]
        if dense := getattr(
            target.config, "first_k_dense_replace", None
        ):  # DeepSeek: blocks without experts come first
            values["first_k_dense_replace"] = sum(i < dense for i in kept)
        config = type(target.config).from_dict(values)
        return AutoModelForCausalLM.from_config(config).to(target.device).eval()
    except (ValueError, RuntimeError, ZeroDivisionError, IndexError, StrictDataclassError) as error:
        raise _impossible(changes, error) from error


def _impossible(changes: Mapping[str, int], error: Exception) -> UserError:
    reason = (str(error).splitlines() or [type(error).__name__])[
        -1
    ].strip()  # the library's first line names a function
    return UserError(f"distill.shape: {dict(changes)} is not a possible shape ({reason})")


@torch.no_grad()
def _runs(draft: DraftLM, target: Target, blocks: Sequence[int]) -> bool:
    """Whether the draft computes what the target does when all blocks but these pass their input on."""

    def pass_on(_module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> Any:
        given = args[0] if args else named["hidden_states"]
        return (given, *output[1:]) if isinstance(output, tuple) else given

    ids = torch.arange(PROBE, device=target.device)[None] % target.usable
    others = [module for i, module in enumerate(target.block_modules) if i not in blocks]
    hooks = [module.register_forward_hook(pass_on, with_kwargs=True) for module in others]
    try:
        expected = target.forward(ids, want_logits=False).last.float()
    finally:
        for hook in hooks:
            hook.remove()
    found = draft.forward(ids, want_logits=False).last.float()
    return bool((found - expected).abs().max() <= 0.01 * expected.abs().max())


def _renumber(name: str, number: dict[int, int]) -> str:
    """The target's name of a draft's tensor: `model.layers.1.x` → `model.layers.5.x` where block 1 came from block 5."""
    return re.sub(r"\.(\d+)\.", lambda match: f".{number[int(match[1])]}.", name, count=1)
