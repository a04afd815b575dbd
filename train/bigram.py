"""A warm start for targets from scratch: embedding and head as the best bigram model of the whole corpus.

Counting pairs of tokens costs nothing, so that the few tokens which the whole model has time to read are not spent on
what a table of pairs knows already. Knows token rows, an embedding, a norm and a head; knows nothing of blocks.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from draftsmith.data.rows import Rows
from draftsmith.progress import ticker
from draftsmith.train.optim import make_optimizer, schedule, set_learning_rate

TOKENS_AT_ONCE = 1024


class Bigrams(NamedTuple):
    """Weighted counts of token pairs, sorted by the first token.

    first: the n tokens that have a successor, int64 [n]; starts: int64 [n + 1], where their pairs begin in `second`
    (int64 [pairs], the successors) and `weight` (float32 [pairs], positive; all together 1).
    """

    first: np.ndarray
    starts: np.ndarray
    second: np.ndarray
    weight: np.ndarray

    def of(self, chosen: np.ndarray, vocabulary: int) -> Tensor:
        """Dense weights float32 [chosen, vocabulary] of the successors of `first[chosen]`."""
        dense = torch.zeros(len(chosen), vocabulary)
        for row, index in enumerate(chosen):
            pairs = slice(self.starts[index], self.starts[index + 1])
            dense[row, torch.from_numpy(self.second[pairs])] = torch.from_numpy(self.weight[pairs])
        return dense


def count_bigrams(rows: Rows, shares: Mapping[str, float], vocabulary: int) -> Bigrams:
    """All pairs whose second token is supervised; the pairs of a domain weigh its share together (Σ shares = 1)."""
    keys: dict[str, list[np.ndarray]] = {domain: [] for domain in rows.domains}
    for row in rows:
        ids = row.token_ids.astype(np.int64)
        keys[row.domain].append((ids[:-1] * vocabulary + ids[1:])[row.supervised[1:]])
    found, weights = [], []
    for domain, parts in keys.items():
        distinct, counts = np.unique(np.concatenate(parts), return_counts=True)
        found.append(distinct)
        weights.append(counts * (shares[domain] / max(1, counts.sum())))
    distinct, place = np.unique(np.concatenate(found), return_inverse=True)
    weight = np.bincount(place, weights=np.concatenate(weights)).astype(np.float32)
    first, starts = np.unique(distinct // vocabulary, return_index=True)
    return Bigrams(first, np.append(starts, len(distinct)), distinct % vocabulary, weight)


class _Bigram(nn.Module):
    """A Llama model whose blocks are the identity. The names are those by which `make_optimizer` tells the three."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = model.model.embed_tokens, model.model.norm, model.lm_head

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.embedding(ids)))
        return logits


def fit_bigrams(model: Any, bigrams: Bigrams, epochs: int, lr: float, seed: int) -> float:
    """Train embedding, last norm and head of a Llama `model` in place, `epochs` passes over all first tokens.

    Loss: Σ_xy weight(x, y) · -log softmax(head(norm(embedding(x))))_y. Returns that of the last pass, in nats per token.
    """
    bigram = _Bigram(model)
    optimizer = make_optimizer(bigram, matrix_lr=lr, other_lr=lr / 5, embedding_lr=lr)
    rng = np.random.default_rng(seed)
    per_epoch = -(-len(bigrams.first) // TOKENS_AT_ONCE)
    device = model.device
    loss = 0.0
    with ticker("fit token pairs", epochs, "passes") as progress:
        for epoch in range(epochs):
            order, loss = rng.permutation(len(bigrams.first)), 0.0
            for part in range(per_epoch):
                chosen = order[part::per_epoch]
                set_learning_rate(optimizer, schedule(epoch * per_epoch + part, epochs * per_epoch, per_epoch))
                weight = bigrams.of(chosen, model.config.vocab_size).to(device)
                logits = bigram(torch.from_numpy(bigrams.first[chosen]).to(device))
                value = -(weight * logits.log_softmax(-1)).sum()
                (value / weight.sum()).backward()
                optimizer.step()
                optimizer.zero_grad()
                loss += float(value.detach())
            progress.advance(1, f"loss {loss:.3f}")
    return loss
