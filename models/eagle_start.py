"""How the layer of an untrained EAGLE head starts.

EAGLE-3's has no residual path from the joined token's embedding, and its states need not resemble anything of the target's. A layer
that starts at random must learn to carry the embedding through attention, which takes most of a small training budget. So it starts
as a guess of the target's next state, where states are at hand to fit it to, or else by passing the embedding on. EAGLE-1's may
start as that guess, too.

Knows a head's weights and a sample of the target's states; knows neither losses nor caches on disk.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from draftsmith.errors import UserError
from draftsmith.models.target import Target

if TYPE_CHECKING:
    from draftsmith.models.eagle import EagleConfig, EagleHead

Start = Literal["states", "embedding"]

# With this scale a slot's score for itself is 1.5² · √head_dim for each input that marks it, far above those of others.
SELF_ATTENTION = 1.5
RIDGE = 0.01  # of the median input's sum of squares: a few huge inputs of a text's first token do not count
TOKENS_PER_INPUT = 16  # that a regression is fitted to
SCALE_TEXTS = 8  # that set the scale of the features


@dataclass(frozen=True)
class Text:
    """What a start sees of one text: the target's taps [n, A, W] of its tokens, their embeddings [n, W] and, None if unknown, the
    last states [n, W], which the target's output head reads."""

    taps: Tensor
    embeddings: Tensor
    last: Tensor | None


def can_start(config: "EagleConfig", start: Start) -> bool:
    """Whether a head's layer can start so: it reads embeddings, and is EAGLE-3's with no more value dimensions than the head is
    wide, or EAGLE-1's, which starts from states alone."""
    if config.kind == "eagle1":
        return start == "states" and config.inputs == "shifted"
    return config.inputs != "feature" and config.kv_heads * config.head_dim <= config.width


def check_start(config: "EagleConfig", start: Start | None, head_from_target: bool) -> None:
    """Raise UserError where a head of this shape cannot have these first weights."""
    values = config.kv_heads * config.head_dim
    if start is not None and not can_start(config, start):
        raise UserError(
            f"EAGLE head: no start from the {start} for {config.kind} with {config.inputs} inputs and {config.kv_heads} · "
            f"{config.head_dim} value dimensions in a width of {config.width}: EAGLE-3 takes inputs other than feature and at most "
            f"{config.width}, EAGLE-1 starts from states alone; set fewer kv_heads, or states_start and embedding_start to false"
        )
    if config.kind == "eagle1" or not (head_from_target or start):
        return
    if config.width > config.target_width:
        raise UserError(
            f"EAGLE head: {config.width} is wider than the target, which it cannot start from; set head_from_target, "
            f"embedding_start and states_start to false, or width to at most {config.target_width}"
        )
    needed = max(values if start else 0, config.width if config.width < config.target_width else 0)
    if needed > config.draft_vocabulary:
        raise UserError(
            f"EAGLE head: {needed} {'value' if needed == values else 'width'} dimensions need a draft vocabulary of at least as "
            f"many tokens, not {config.draft_vocabulary}"
        )


@torch.no_grad()
def initialise(
    head: "EagleHead",
    target: Target,
    *,
    head_from_target: bool = True,
    start: Start | None = None,
    texts: Iterable[Text] = (),
    seed: int = 0,
) -> None:
    """Give a head on the CPU its first weights, all of which follow from the arguments.

    Matrices are N(0, 0.02), biases 0. The output head starts from the target's rows for the draft's tokens (`head_from_target`; in
    a narrower head, from their coordinates along their leading singular directions), which is worth more than any choice of loss
    at small budgets; the layer starts from the target's states (`start_from_states`) or the embedding (`start_from_embedding`) of
    `texts`, or at random (None). Raises UserError where the head's shape (`check_start`) or the texts do not allow that start.
    """
    config, generator = head.config, torch.Generator().manual_seed(seed)
    check_start(config, start, head_from_target)
    for parameter in head.parameters():
        if parameter.ndim == 2:
            parameter.normal_(0.0, 0.02, generator=generator)
    for module in head.modules():
        if isinstance(module, nn.Linear) and module.bias is not None:
            module.bias.zero_()  # or it would be what this process drew before
    if head.confidence_head is not None:
        head.confidence_head.weight.zero_()
    if head.lm_head is None and start == "states":
        start_eagle1_from_states(head, texts)
    if head.lm_head is None or not (head_from_target or start):
        return
    rows = target.head_rows(head.vocabulary.target_ids).float().cpu()
    down = torch.eye(config.width) if config.width == target.width else leading_directions(rows, config.width)
    if head_from_target:
        head.lm_head.weight.copy_(rows @ down.T)
    if start == "states":
        start_from_states(head, texts, down)
    elif start == "embedding":
        start_from_embedding(head, texts, down)


@dataclass(frozen=True)
class _Slots:
    """Neighbouring slots t of a text: taps [n, A, W] of x_t; embedding [n, W] of x_{t+1}; last [n, W], the state that the target's
    output head reads at t, and following [n, W], the one at t + 1."""

    taps: Tensor
    embedding: Tensor
    last: Tensor
    following: Tensor


def _slots(texts: Iterable[Text], tokens: int) -> Iterator[_Slots]:
    """The slots of the first texts, until they have so many tokens. Raises UserError for a text without last states."""
    seen = 0
    for text in texts:
        if text.last is None:
            raise UserError("states_start: the cache holds no last states; cache it again with cache.last=true")
        yield _Slots(text.taps[:-1], text.embeddings[1:], text.last[:-1], text.last[1:])
        seen += len(text.taps)
        if seen >= tokens:
            return


@torch.no_grad()
def start_from_states(head: "EagleHead", texts: Iterable[Text], down: Tensor) -> None:
    """Make an untrained head a good guess of the target's next state, at every rollout step.

    Three ridge regressions, all in the space of the states that the output head reads. The fused taps guess the target's last
    state, g_t ≈ h_t, so that a slot's first feature and the head's own states after it are of one kind. Then
    [norm(e_{t+1}), norm(g_t)] guesses h_{t+1} − g_t, what the layer has to add to its residual g_t: attention starts by looking at
    its own slot, and value and output projection are that guess, of the rank that there are value dimensions. What is left is
    guessed by the MLP, whose random gates stay as they are: only its last projection is fitted.

    A slot is told from others by its embedding and its feature: by the embedding alone it would look at all slots of that token.

    texts: read three times, as far as the largest regression needs. down: [H, W], from the target's width to the head's (the
    identity where they are equal).
    """
    layer, norm, feature_norm = head.first_layer, head.norm, head.first_layer.hidden_norm
    assert norm is not None
    assert feature_norm is not None
    inputs_of = (head.fc, layer.self_attn.v_proj, layer.mlp.down_proj)
    tokens = TOKENS_PER_INPUT * max(projection.in_features for projection in inputs_of)
    head.fc.weight.copy_(_ridge((head.joined(some.taps), some.last @ down.T) for some in _slots(texts, tokens)))

    def read(some: _Slots) -> tuple[Tensor, Tensor]:
        feature = head.fc(head.joined(some.taps))
        return feature, torch.cat([layer.input_layernorm(some.embedding), feature_norm(feature)], dim=-1)

    def steps() -> Iterator[tuple[Tensor, Tensor]]:
        for some in _slots(texts, tokens):
            feature, inputs = read(some)
            yield inputs, some.following @ down.T - feature

    for projection in (layer.self_attn.v_proj, layer.self_attn.o_proj):
        projection.weight.zero_()  # what is random here would be noise in every guess
    both = torch.cat([down, torch.eye(len(down))], dim=1)
    linear, sizes = _pass_on(head, _ridge(steps()), both), []

    def rests() -> Iterator[tuple[Tensor, Tensor]]:
        for some in _slots(texts, tokens):
            feature, inputs = read(some)
            between, wanted = feature + inputs @ linear.T, some.following @ down.T
            sizes.append(wanted.pow(2).mean(-1).sqrt())
            yield layer.mlp.hidden(layer.post_attention_layernorm(between)), wanted - between

    layer.mlp.down_proj.weight.copy_(_ridge(rests()))
    norm.weight.fill_(torch.cat(sizes).mean())


@torch.no_grad()
def start_from_embedding(head: "EagleHead", texts: Iterable[Text], down: Tensor) -> None:
    """Make an untrained head predict, at every rollout step, from the joined token alone: as its output head reads the embedding.

    Attention starts by looking at its own slot, by passing the embedding on, and by taking the incoming feature off the residual,
    with features of rms 1: x = g + (down · norm(e) − norm(g)) = down · norm(e), whose rms is about 1 again. Of little use where the
    target's output head is its embedding: that reads the token itself there.

    texts: the taps of the first few set the scale of the features. down: [H, W], from the target's width to the head's (the
    identity where they are equal).
    """
    taps = [text.taps for text in itertools.islice(texts, SCALE_TEXTS)]
    if not taps:
        raise UserError(
            "embedding_start: no row of the cache can be read; cache it again, or set embedding_start to false"
        )
    head.fc.weight /= head.fuse(torch.cat(taps)[None]).pow(2).mean().sqrt()
    identity = torch.eye(len(down))
    _pass_on(head, torch.cat([down, -identity], dim=1), torch.cat([down, 0 * identity], dim=1))


@torch.no_grad()
def start_eagle1_from_states(head: "EagleHead", texts: Iterable[Text]) -> None:
    """Make an untrained EAGLE-1 head a good guess of the target's next state, at every rollout step.

    Two ridge regressions: the fusion guesses h_{t+1} from [e_{t+1}, h_t], and what is left is guessed by the MLP, as in
    `start_from_states`. Attention adds nothing at first: its output projection is zero.

    texts: read twice, as far as the larger regression needs.
    """
    layer = head.first_layer
    tokens = TOKENS_PER_INPUT * max(head.fc.in_features, layer.mlp.down_proj.in_features)

    def steps() -> Iterator[tuple[Tensor, Tensor]]:
        for some in _slots(texts, tokens):
            yield torch.cat([some.embedding, some.last], dim=-1), some.following

    def rests() -> Iterator[tuple[Tensor, Tensor]]:
        for inputs, following in steps():
            fused = head.fc(inputs)
            yield layer.mlp.hidden(layer.post_attention_layernorm(fused)), following - fused

    head.fc.weight.copy_(_ridge(steps()))
    layer.self_attn.o_proj.weight.zero_()
    layer.mlp.down_proj.weight.copy_(_ridge(rests()))


def _pass_on(head: "EagleHead", linear: Tensor, marks: Tensor) -> Tensor:
    """Let the first layer's attention add linear · [norm(e), norm(g)] of its own slot; linear [H, W + H]. Returns what of it fits
    through the value dimensions, of the same shape.

    marks: [H, W + H], by what of [norm(e), norm(g)] slots are told apart: query and key are one map of it, and a slot matches
    itself best. Value and output projection span the leading right singular vectors of the output head: all directions if there
    are as many value dimensions as the head is wide, of which there may be no more. How many heads read them does not matter.
    """
    config, attention, output = head.config, head.first_layer.self_attn, head.lm_head
    assert output is not None
    basis = leading_directions(output.weight, config.kv_heads * config.head_dim)
    groups = config.heads // config.kv_heads
    split = (config.kv_heads, 1, config.head_dim, -1)
    queries = basis.view(split).expand(-1, groups, -1, -1).reshape(-1, config.width)
    attention.q_proj.weight += SELF_ATTENTION * queries @ marks
    attention.k_proj.weight += SELF_ATTENTION * basis @ marks
    attention.v_proj.weight += basis @ linear
    attention.o_proj.weight += queries.T / groups
    return basis.T @ basis @ linear


def leading_directions(rows: Tensor, count: int) -> Tensor:
    """The `count` leading right singular vectors [count, W] of rows [N, W], which has no fewer: eigenvectors of rowsᵀ rows, so that
    no matrix as tall as a vocabulary is decomposed."""
    return torch.linalg.eigh(rows.T @ rows).eigenvectors.flip(1)[:, :count].T


def _ridge(pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """M [out, in] that minimises Σ ‖M x − y‖² + λ ‖M‖² over pairs of x [n, in] and y [n, out]; λ is `RIDGE` of the median over
    inputs of Σ x². Raises UserError for no pairs, or inputs that are zero."""
    inner: Tensor | None = None
    for x, y in pairs:
        if inner is None:
            inner = torch.zeros(x.shape[1], x.shape[1], dtype=torch.float64)
            outer = torch.zeros(x.shape[1], y.shape[1], dtype=torch.float64)
        inner += x.T @ x
        outer += x.T @ y
    if inner is None or not inner.any():
        raise UserError(
            "states_start: the rows that are trained on have no two neighbouring tokens with states to fit; train on more "
            "tokens, or set states_start to false"
        )
    squares = inner.diagonal()
    squares.add_(RIDGE * max(float(squares.median()), 1e-9 * float(squares.mean())))
    return torch.linalg.solve(inner, outer).T.float()
