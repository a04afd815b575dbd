"""Lookahead decoding (Fu et al. 2024, arXiv 2402.02057): drafts without any draft model, by Jacobi iteration on the target.

A window of guesses rides along in every verify as a tree of its own: level 0 is a chain of W guessed tokens below the pending one,
and below each of them hangs a chain of N − 2 more. What the target answers after the last of each chain extends it to an N-gram,
which goes into a pool by its first token; N-grams that begin with the pending token are the candidates of the next proposal.
"""

from collections import OrderedDict

import torch
from torch import Tensor

from draftsmith.eval.drafters import Committed, Drafter
from draftsmith.eval.sampling import Sampler
from draftsmith.eval.tree import Proposal, Shape

Gram = tuple[int, ...]


class _Row:
    """One prompt's window and pool. levels[i][j]: guess of the token j + i + 1 places behind the pending one."""

    def __init__(self, tokens: list[int], window: int, grams: int) -> None:
        # Any tokens will do as first guesses; the text's own are likelier than others to come again.
        self.levels = [[tokens[(3 * i + 5 * j) % len(tokens)] for j in range(window)] for i in range(grams - 1)]
        self.pool: dict[int, OrderedDict[Gram, None]] = {}
        self.last_nodes: list[int] = []

    def candidates(self, pending: int, most: int) -> list[Gram]:
        """What has followed this token in the pool, the most recent first."""
        return list(reversed(self.pool.get(pending, OrderedDict())))[:most]

    def learn(self, answers: list[int], most: int) -> None:
        """Store the window's N-grams, and move the window on by one Jacobi iteration."""
        for column, answer in enumerate(answers):
            first, *rest = [level[column] for level in self.levels]
            grams = self.pool.setdefault(first, OrderedDict())
            grams.pop((*rest, answer), None)
            grams[(*rest, answer)] = None
            if len(grams) > most:
                grams.popitem(last=False)
        self.levels = [*self.levels[1:], answers]


class Lookahead(Drafter):
    """window: W columns; grams: N; candidates: how many N-grams of the pool are verified at once, and kept per token."""

    def __init__(self, window: int = 8, grams: int = 4, candidates: int = 8) -> None:
        self.window, self.grams, self.most = window, grams, candidates
        self.most_nodes = 1 + (window + candidates) * (grams - 1)

    def begin(self, batch: int, capacity: int) -> None:
        self._rows: list[_Row] = []

    def propose(self, committed: Committed, shape: Shape, sampler: Sampler) -> Proposal:
        if not self._rows:
            self._rows = [_Row(tokens, self.window, self.grams) for tokens in committed.tokens]
        trees = [self._tree(row, tokens[-1]) for row, tokens in zip(self._rows, committed.tokens, strict=True)]
        count = max(len(tokens) for tokens, _ in trees)
        # Padding hangs below the root, where nobody sees it and `sizes` leaves it out.
        ids = torch.tensor([tokens + [0] * (count - len(tokens)) for tokens, _ in trees])
        parents = torch.tensor([parents + [0] * (count - len(parents)) for _, parents in trees])
        return Proposal(ids, parents, torch.tensor([len(tokens) for tokens, _ in trees]))

    def observe(self, logits: Tensor) -> None:
        best = logits.argmax(-1)
        for index, row in enumerate(self._rows):
            row.learn(best[index, row.last_nodes].tolist(), self.most)

    def keep(self, rows: Tensor) -> None:
        self._rows = [self._rows[row] for row in rows.tolist()]

    def _tree(self, row: _Row, pending: int) -> tuple[list[int], list[int]]:
        """Tokens and parents: the candidates, merged where they share a beginning, then the window."""
        tokens, parents = [pending], [-1]
        node_of: dict[Gram, int] = {(): 0}
        for gram in row.candidates(pending, self.most):
            for length in range(1, len(gram) + 1):
                if gram[:length] not in node_of:
                    node_of[gram[:length]] = len(tokens)
                    tokens.append(gram[length - 1])
                    parents.append(node_of[gram[: length - 1]])
        row.last_nodes = []
        above = 0
        for column in range(self.window):
            for level, guesses in enumerate(row.levels):
                parents.append(above if level == 0 else len(tokens) - 1)
                tokens.append(guesses[column])
            above = len(tokens) - len(row.levels)
            row.last_nodes.append(len(tokens) - 1)
        return tokens, parents
