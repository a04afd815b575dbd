"""Any tree of tokens: what one verify accepts, against running the target from scratch on every branch."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from law import PROMPT, V, five_token_target

from draftsmith.eval.decode import Decoding, decode
from draftsmith.eval.drafters import Drafter
from draftsmith.eval.sampling import Sampler
from draftsmith.eval.tree import Proposal, chain, chain_shape

TARGET = five_token_target()


@st.composite
def token_trees(draw, largest=14):
    """(token, parent) of the nodes below the root; siblings differ."""
    nodes = [(PROMPT[-1], -1)]
    for _ in range(draw(st.integers(1, largest))):
        free = [
            (token, parent) for parent in range(len(nodes)) for token in range(V) if (token, parent) not in nodes[1:]
        ]
        nodes.append(draw(st.sampled_from(free)))
    return nodes


class Given(Drafter):
    """Proposes one tree, then nothing."""

    def __init__(self, nodes):
        tokens, parents = zip(*nodes, strict=True)
        self.tree = Proposal(torch.tensor([tokens]), torch.tensor([parents]), torch.tensor([len(nodes)]))

    def propose(self, committed, shape, sampler):
        tree, self.tree = self.tree, None
        return tree or chain(torch.tensor([[committed.tokens[0][-1]]]))


def best_after(text):
    with torch.no_grad():
        return int(TARGET.forward(torch.tensor([text])).logits[0, -1].argmax())


def longest_branch(nodes, text, node=0):
    """The tokens that a verifier may keep, found by trying every child from scratch."""
    found = []
    for child, (token, parent) in enumerate(nodes):
        if child and parent == node and token == best_after(text):
            found = max(found, [token, *longest_branch(nodes, [*text, token], child)], key=len)
    return found


@settings(max_examples=25, deadline=None)
@given(token_trees())
def test_a_verify_keeps_the_longest_right_branch_and_adds_the_targets_next_token(nodes):
    kept = longest_branch(nodes, PROMPT)
    how = Decoding(chain_shape(len(nodes)), Sampler(0.0), len(kept) + 3, eos_ids=frozenset())
    [out] = decode(TARGET, Given(nodes), [PROMPT], how)
    assert out.tokens[: out.trace[0].emitted] == [*kept, best_after([*PROMPT, *kept])]
    assert out.trace[0].accepted == len(kept)
    text = list(PROMPT)
    for token in out.tokens:  # what the cache holds after the tree is as good as a fresh one
        assert token == best_after(text)
        text.append(token)
    places = [[token for token, above in nodes[1:] if above == parent] for parent in range(len(nodes))]
    assert all(rank < max(map(len, places)) for rank in out.trace[0].ranks)
    assert len(out.trace[0].ranks) == len(kept)
