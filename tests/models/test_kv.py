"""The KV cache and its masks, against models run from scratch on the same tokens."""

import pytest
import torch
from kit import tiny_target

from draftsmith.models.kv import KVCache, attention_mask

FLAVOURS = ["plain", "gemma2", "mistral-window"]
LENGTHS = [20, 7, 13]
#        root ── a
#           └── b ── c
TREE = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)[None]
DEPTHS = torch.tensor([[0, 1, 1, 2]])


def prefilled(target, seed=0):
    """A cache of three rows of unequal length, and their tokens."""
    torch.manual_seed(seed)
    ids = torch.randint(6, 100, (3, 20))
    cache = target.new_cache(3, 64)
    target.forward(ids, cache=cache)
    cache.set_lengths(torch.tensor(LENGTHS))
    return cache, [ids[row, :n] for row, n in enumerate(LENGTHS)]


def fresh_logits(target, *parts):
    return target.model(torch.cat(parts)[None]).logits[0]


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_a_branch_of_a_tree_gets_the_logits_that_it_gets_alone(flavour):
    target = tiny_target(flavour)
    cache, prefixes = prefilled(target)
    tree = torch.randint(6, 100, (3, 4))
    out = target.forward(tree, cache=cache, visible=TREE, depths=DEPTHS)
    for row, prefix in enumerate(prefixes):
        for branch in ([0, 1], [0, 2, 3]):
            alone = fresh_logits(target, prefix, tree[row, branch])[-len(branch) :]
            torch.testing.assert_close(out.logits[row, branch], alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_after_commit_the_kept_branch_is_as_if_it_had_been_fed_alone(flavour):
    target = tiny_target(flavour)
    cache, prefixes = prefilled(target)
    tree, more = torch.randint(6, 100, (3, 4)), torch.randint(6, 100, (3, 2))
    target.forward(tree, cache=cache, visible=TREE, depths=DEPTHS)
    paths = [[0, 2, 3], [0, 1], [0]]
    cache.commit(paths)
    out = target.forward(more, cache=cache)
    for row, prefix in enumerate(prefixes):
        alone = fresh_logits(target, prefix, tree[row, paths[row]], more[row])[-2:]
        torch.testing.assert_close(out.logits[row], alone, atol=1e-5, rtol=0)


def test_selected_rows_go_on_alone():
    target = tiny_target()
    cache, prefixes = prefilled(target)
    cache.select(torch.tensor([2, 0]))
    more = torch.randint(6, 100, (2, 3))
    out = target.forward(more, cache=cache)
    for row, prefix in enumerate([prefixes[2], prefixes[0]]):
        torch.testing.assert_close(out.logits[row], fresh_logits(target, prefix, more[row])[-3:], atol=1e-5, rtol=0)


def test_mask_equals_brute_force_with_windows_and_unequal_rows():
    generator = torch.Generator().manual_seed(0)
    for window in (None, 1, 3, 8):
        cache = KVCache(2, 32, 1)
        cache.set_lengths(torch.tensor([9, 4]))
        parents = [-1, 0, 0, 1, int(torch.randint(0, 4, (), generator=generator))]
        ancestors = [[0]]
        for node, parent in enumerate(parents[1:], 1):
            ancestors.append([*ancestors[parent], node])
        visible = torch.tensor([[[j in ancestors[i] for j in range(5)] for i in range(5)]])
        positions = cache.lengths[:, None] + torch.tensor([[len(a) - 1 for a in ancestors]])
        mask = attention_mask(cache, visible, positions, torch.float32, window)
        for row, length in enumerate((9, 4)):
            for i in range(5):
                for key in range(14):
                    node = key - length
                    seen = node < 0 or (node < 5 and node in ancestors[i])
                    place = key if node < 0 else length + len(ancestors[node]) - 1 if node < 5 else 0
                    seen &= window is None or int(positions[row, i]) - place < window
                    assert (mask[row, 0, i, key] == 0) == seen, (window, row, i, key)


def test_a_full_cache_says_so():
    cache = KVCache(1, 4, 1)
    with pytest.raises(IndexError, match="holds 4 entries, 5 are needed"):
        cache.end(5)
