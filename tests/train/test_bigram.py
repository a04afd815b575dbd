"""The warm start: counts of supervised pairs, weighed by domain, and a fit that reaches the best table of pairs."""

from pathlib import Path

import numpy as np
import pytest
import torch
from kit import tiny_rows, tiny_tokenizer

from draftsmith.train.bigram import Bigrams, count_bigrams, fit_bigrams
from draftsmith.train.pretrain import new_model
from draftsmith.train.settings import ScratchSettings

SHARES = {"code": 0.5, "prose": 0.3, "chat": 0.2}


def test_pairs_count_once_for_each_supervised_second_token_and_never_across_rows(tmp_path: Path) -> None:
    rows = tiny_rows(tmp_path, [9, 14, 7, 20, 2, 11])
    expected = np.zeros((152, 152))
    for row in rows:
        total = sum(int(other.supervised.sum()) for other in rows if other.domain == row.domain)
        for t in np.flatnonzero(row.supervised):
            expected[row.token_ids[t - 1], row.token_ids[t]] += SHARES[row.domain] / total
    found = count_bigrams(rows, SHARES, 152)
    dense = np.zeros((152, 152))
    dense[found.first] = found.of(np.arange(len(found.first)), 152).numpy()
    np.testing.assert_allclose(dense, expected, rtol=1e-5)
    assert dense.sum() == pytest.approx(1, rel=1e-5)


def test_the_fit_approaches_the_entropy_of_the_pairs_and_touches_no_block() -> None:
    settings = ScratchSettings(vocabulary=12, width=16, blocks=2, heads=4, kv_heads=2, intermediate=8, bigram_lr=0.1)
    model = new_model(settings, tiny_tokenizer(), seed=0)
    blocks = {name: value.clone() for name, value in model.model.layers.state_dict().items()}
    table = torch.rand(12, 12, generator=torch.Generator().manual_seed(0)).double() ** 3
    table /= table.sum()
    entropy = float(-(table * (table / table.sum(1, keepdim=True)).log()).sum())
    bigrams = Bigrams(
        np.arange(12), np.arange(0, 145, 12), np.tile(np.arange(12), 12), table.flatten().numpy().astype(np.float32)
    )
    loss = fit_bigrams(model, bigrams, epochs=150, lr=0.1, seed=0)
    assert entropy < loss < entropy + 0.02
    ids = torch.tensor([[3, 7, 1]])
    with torch.no_grad():  # the blocks are the identity at first, so the whole model is that table
        p = model(ids).logits.softmax(-1)[0].double()
    torch.testing.assert_close(p, (table / table.sum(1, keepdim=True))[ids[0]], atol=0.04, rtol=0)
    assert all(torch.equal(value, blocks[name]) for name, value in model.model.layers.state_dict().items())
