"""From logits to the distribution that is sampled, and from uniform numbers to tokens.

One `Sampler` serves plain decoding, drafting and verifying, so that p is the same distribution in all three. Each prompt has
its own random stream: what it emits depends neither on its neighbours in the batch nor on the order of the prompts.
"""

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from draftsmith.errors import UserError
from draftsmith.eval.tree import Proposal


def processed(
    logits: Tensor,
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Tensor:
    """Logits [..., V] → probabilities [..., V] in float64 after temperature (> 0), then top-k, then top-p, then min-p.

    top-k keeps the k largest logits and what ties with the last of them. top-p keeps the smallest set of likeliest tokens whose
    mass reaches `top_p`. min-p keeps the tokens with at least `min_p` times the probability of the likeliest one.
    """
    z = (
        logits.double() - logits.amax(-1, keepdim=True)
    ) / temperature  # the maximum is 0: nothing overflows at any temperature
    if top_k is not None and top_k < z.shape[-1]:
        z = z.masked_fill(z < z.topk(top_k, dim=-1).values[..., -1:], float("-inf"))
    p = z.softmax(-1)
    if top_p is not None and top_p < 1.0:
        ordered, order = p.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        p = torch.zeros_like(p).scatter(-1, order, ordered.masked_fill(before >= top_p, 0.0))
    if min_p is not None:
        p = p.masked_fill(p < min_p * p.amax(-1, keepdim=True), 0.0)
    return p / p.sum(-1, keepdim=True)


def draw(p: np.ndarray, u: float) -> int:
    """The token at which the cumulative sum of p [V] (any positive total) passes u · total, for u uniform in [0, 1)."""
    cumulative = np.cumsum(p)
    token = int(np.searchsorted(cumulative, u * cumulative[-1], side="right"))
    return min(token, len(p) - 1) if p[min(token, len(p) - 1)] > 0 else int(np.flatnonzero(p)[-1])


@dataclass
class Sampler:
    """Decoding settings plus one random stream per active row. temperature 0 is greedy decoding.

    repetition_penalty divides positive and multiplies negative logits of tokens in prompt or output (CTRL, arXiv 1909.05858);
    presence_penalty is taken off the logits of tokens in the output. Both act on p as in plain decoding and not on q, which changes
    how much is accepted and never what is emitted. `greedy_draft` drafts the likeliest token at any temperature (a deterministic
    proposal). `typical` = (ε, δ) accepts as Medusa does, which is lossy.
    """

    temperature: float
    top_k: int | None = None
    top_p: float | None = None
    greedy_draft: bool = False
    min_p: float | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    typical: tuple[float, float] | None = None
    streams: list[np.random.Generator] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise UserError(f"temperature {self.temperature}: must be 0 (greedy) or above")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k {self.top_k}: must be at least 1")
        for name, share in (("top_p", self.top_p), ("min_p", self.min_p)):
            if share is not None and not 0.0 < share <= 1.0:
                raise UserError(f"{name} {share}: must lie in (0, 1]")
        if not 0 < self.repetition_penalty < float("inf"):
            raise UserError(f"repetition_penalty {self.repetition_penalty}: must be above 0 (1 is none)")
        if not abs(self.presence_penalty) < float("inf"):
            raise UserError(f"presence_penalty {self.presence_penalty}: must be a number (0 is none)")

    def only(self, active: list[bool]) -> "Sampler":
        """The same sampler, in which rows that are not active leave their random streams untouched."""
        idle = np.random.default_rng(0)
        return replace(self, streams=[s if on else idle for s, on in zip(self.streams, active, strict=True)])

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def start(self, seed: int | None, names: list[int]) -> None:
        """One stream per prompt, made from the seed and the prompt's own name (a number that stays with it)."""
        if seed is not None and seed < 0:
            raise UserError(f"seed {seed}: must be 0 or above")
        root = int(np.random.default_rng(seed).integers(2**63))
        self.streams = [np.random.default_rng([root, name]) for name in names]

    def probabilities(self, logits: Tensor) -> Tensor:
        """p, or q, of these logits at this temperature > 0."""
        return processed(logits, self.temperature, self.top_k, self.top_p, self.min_p)

    def penalised(self, logits: Tensor, texts: list[tuple[list[int], list[int]]], proposal: Proposal) -> Tensor:
        """The target's logits [B, n, V] with the penalties that plain decoding would apply after each node's path.

        texts: (prompt, output) of each row, the pending token included; below it, a path's own tokens are output too.
        """
        if self.repetition_penalty == 1.0 and self.presence_penalty == 0.0:
            return logits
        batch, _, size = logits.shape
        below_root = proposal.visible.expand(batch, -1, -1).clone()
        below_root[:, :, 0] = False
        on_path = torch.zeros_like(logits).scatter_add_(
            2, proposal.tokens[:, None].expand_as(below_root), below_root.to(logits)
        )
        written = torch.zeros(batch, 1, size, dtype=torch.bool)
        given = torch.zeros(batch, 1, size, dtype=torch.bool)
        for row, (prompt, output) in enumerate(texts):
            given[row, 0, prompt] = True
            written[row, 0, output] = True
        written = written | (on_path > 0)
        penalty = self.repetition_penalty
        scaled = torch.where(logits > 0, logits / penalty, logits * penalty)
        logits = torch.where(written | given, scaled, logits)
        return logits - self.presence_penalty * written.to(logits)

    @property
    def lossless(self) -> bool:
        """Whether what is emitted follows the target's distribution."""
        return self.typical is None or self.greedy

    @property
    def deterministic(self) -> bool:
        """Whether drafts are the likeliest tokens (point masses) and not samples."""
        return self.greedy or self.greedy_draft

    def draft(self, logits: Tensor, count: int = 1) -> tuple[Tensor, Tensor | None]:
        """`count` distinct tokens per row [B, count] from draft logits [B, V_d], and the q [B, V_d] they were drawn from without
        replacement (None: point masses, the likeliest first). A q with fewer tokens than that repeats its last one, which the
        rejection rule then never accepts a second time.
        """
        if self.deterministic:
            best = logits.argmax(-1, keepdim=True) if count == 1 else logits.topk(count, dim=-1).indices
            return best, None
        q = self.probabilities(logits)
        drawn = []
        for row, stream in zip(q.numpy(), self.streams, strict=True):
            left, tokens = row, []
            for uniform in stream.random(count):
                if left.any():
                    tokens.append(draw(left, uniform))
                    if count > 1:
                        left = left.copy()
                        left[tokens[-1]] = 0.0
                else:
                    tokens.append(tokens[-1])
            drawn.append(tokens)
        return torch.tensor(drawn), q
