"""How the layer of an untrained EAGLE-3 head starts.

The head has no residual path from the joined token's embedding, and its states need not resemble anything of the target's. A layer
that starts at random must learn to carry the embedding through attention, which takes most of a small training budget. So it starts
as a guess of the target's next state, where states are at hand to fit it to, or else by passing the embedding on.

Knows a head's weights and a sample of the target's states; knows neither losses nor caches on disk.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftsmith.errors import UserError

if TYPE_CHECKING:
    from draftsmith.models.eagle import EagleHead

# With this scale a slot's score for itself is 1.5² · √head_dim, far above those of other tokens.
SELF_ATTENTION = 1.5
RIDGE = 0.01  # of the median input's sum of squares: a few huge inputs of a text's first token do not count


@dataclass(frozen=True)
class Slots:
    """Neighbouring slots t of a text: taps [n, A, W] of x_t; embedding [n, W] of x_{t+1}; last [n, W], the state that the target's
    output head reads at t, and following [n, W], the one at t + 1."""

    taps: Tensor
    embedding: Tensor
    last: Tensor
    following: Tensor


@torch.no_grad()
def start_from_states(head: "EagleHead", slots: Iterable[Slots], down: Tensor) -> None:
    """Make an untrained head a good guess of the target's next state, at every rollout step.

    Three ridge regressions, all in the space of the states that the output head reads. The fused taps guess the target's last
    state, g_t ≈ h_t, so that a slot's first feature and the head's own states after it are of one kind. Then
    [norm(e_{t+1}), norm(g_t)] guesses h_{t+1} − g_t, what the layer has to add to its residual g_t: attention starts by looking at
    its own slot, and value and output projection are that guess, of the rank that there are value dimensions. What is left is
    guessed by the MLP, whose random gates stay as they are: only its last projection is fitted.

    slots: read four times. down: [H, W], from the target's width to the head's (the identity where they are equal).
    """
    layer, norm, feature_norm = head.first_layer, head.norm, head.first_layer.hidden_norm
    assert norm is not None
    assert feature_norm is not None
    head.fc.weight.copy_(_ridge((head.joined(some.taps), some.last @ down.T) for some in slots))
    if head.fc.bias is not None:
        head.fc.bias.zero_()

    def read(some: Slots) -> tuple[Tensor, Tensor]:
        feature = head.fc(head.joined(some.taps))
        return feature, torch.cat([layer.input_layernorm(some.embedding), feature_norm(feature)], dim=-1)

    def steps() -> Iterator[tuple[Tensor, Tensor]]:
        for some in slots:
            feature, inputs = read(some)
            yield inputs, some.following @ down.T - feature

    for projection in (layer.self_attn.v_proj, layer.self_attn.o_proj):
        projection.weight.zero_()  # what is random here would be noise in every guess
    linear = _pass_on(head, _ridge(steps()), down)

    def rests() -> Iterator[tuple[Tensor, Tensor]]:
        for some in slots:
            feature, inputs = read(some)
            between = feature + inputs @ linear.T
            yield layer.mlp.hidden(layer.post_attention_layernorm(between)), some.following @ down.T - between

    layer.mlp.down_proj.weight.copy_(_ridge(rests()))
    sizes = torch.cat([(some.following @ down.T).pow(2).mean(-1).sqrt() for some in slots])
    norm.weight.fill_(sizes.mean())


@torch.no_grad()
def start_from_embedding(head: "EagleHead", taps: Tensor, down: Tensor) -> None:
    """Make an untrained head predict, at every rollout step, from the joined token alone: as its output head reads the embedding.

    Attention starts by looking at its own slot, by passing the embedding on, and by taking the incoming feature off the residual,
    with features of rms 1: x = g + (down · norm(e) − norm(g)) = down · norm(e), whose rms is about 1 again. Of little use where the
    target's output head is its embedding: that reads the token itself there.

    taps: [n, A, W], a sample of the target's, which sets the scale of the features. down: [H, W], from the target's width to the
    head's (the identity where they are equal).
    """
    head.fc.weight /= head.fuse(taps[None]).pow(2).mean().sqrt()
    _pass_on(head, torch.cat([down, -torch.eye(len(down))], dim=1), down)


def _pass_on(head: "EagleHead", linear: Tensor, down: Tensor) -> Tensor:
    """Let the first layer's attention add linear · [norm(e), norm(g)] of its own slot; linear [H, W + H]. Returns what of it fits
    through the value dimensions, of the same shape.

    Query and key are one map of the normed embedding, and a slot matches itself best. Value and output projection span the leading
    right singular vectors of the output head: all directions if there are as many value dimensions as the head is wide, of which
    there may be no more. How many heads read them does not matter.
    """
    config, attention, output = head.config, head.first_layer.self_attn, head.lm_head
    assert output is not None
    basis = leading_directions(output.weight, config.kv_heads * config.head_dim)
    embedding, groups = slice(0, config.target_width), config.heads // config.kv_heads
    split = (config.kv_heads, 1, config.head_dim, -1)
    queries = basis.view(split).expand(-1, groups, -1, -1).reshape(-1, config.width)
    attention.q_proj.weight[:, embedding] += SELF_ATTENTION * queries @ down
    attention.k_proj.weight[:, embedding] += SELF_ATTENTION * basis @ down
    attention.v_proj.weight += basis @ linear
    attention.o_proj.weight += queries.T / groups
    return basis.T @ basis @ linear


def leading_directions(rows: Tensor, count: int) -> Tensor:
    """The `count` leading right singular vectors [count, W] of rows [N, W]: eigenvectors of rowsᵀ rows, so that no matrix as tall
    as a vocabulary is decomposed. Raises UserError where rows have fewer."""
    if count > min(rows.shape):
        raise UserError(
            f"EAGLE head: {count} value dimensions need a draft vocabulary of at least as many tokens, not {len(rows)}"
        )
    return torch.linalg.eigh(rows.T @ rows).eigenvectors.flip(1)[:, :count].T


def _ridge(pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """M [out, in] that minimises Σ ‖M x − y‖² + λ ‖M‖² over pairs of x [n, in] and y [n, out]; λ is `RIDGE` of the median over
    inputs of Σ x². Raises UserError for no pairs, or inputs that are zero."""
    inner = outer = torch.zeros((), dtype=torch.float64)
    for x, y in pairs:
        inner, outer = inner + (x.T @ x).double(), outer + (x.T @ y).double()
    if inner.ndim == 0 or not inner.any():
        raise UserError(
            "states_start: the rows that are trained on have no two neighbouring tokens with states to fit; train on more "
            "tokens, or set states_start to false"
        )
    squares = inner.diagonal()
    squares.add_(RIDGE * max(float(squares.median()), 1e-9 * float(squares.mean())))
    return torch.linalg.solve(inner, outer).T.float()
