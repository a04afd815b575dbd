"""`evaluation.tree`: what is possible, what it becomes, and that the results are those of that tree."""

import numpy as np
import pytest
from kit import tiny_target
from pydantic import ValidationError

from draftsmith import speculative_decode
from draftsmith.errors import UserError
from draftsmith.eval.acceptance import PlainRuns, evaluate, shape_for
from draftsmith.eval.drafters import LMDrafter, PromptLookup
from draftsmith.eval.prompts import Writer
from draftsmith.eval.settings import EvalSettings
from draftsmith.eval.tree import Dynamic, Static, as_shape, chain_shape
from draftsmith.models.draft import DraftLM

SMALL = {"K": 3, "prompts": 4, "prompt_tokens": 6, "max_new_tokens": 10, "batch": 4, "timed_prompts": 0}
FORK = [-1, 0, 0, 1, 3]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tree": [-1, 0, 2]}, "node 2 has parent 2"),
        ({"tree": [0, 0]}, "node 0 has parent 0"),
        ({"tree": [-1, 0, 1], "K": 3}, "depth is 2 and K is 3"),
        ({"tree": []}, "depth is 0"),
        ({"tree": "dynamic", "tree_nodes": 201}, "tree_nodes"),
        ({"tree": "static", "tree_nodes": 2}, "tree_nodes"),
        ({"tree": "bush"}, "tree"),
        ({"tree": "static", "min_confidence": 0.5}, "only chains"),
    ],
)
def test_impossible_trees_are_refused_with_the_field_named(given, message):
    with pytest.raises(ValidationError, match=message):
        EvalSettings(**{"K": 4, **given})


def test_names_of_trees_become_shapes_of_depth_k():
    assert as_shape("chain", 4) == chain_shape(4)
    assert as_shape("dynamic", 4, 12, 3) == Dynamic(3, 4, 12)
    static = as_shape("static", 6, 32, 8)
    assert (static.nodes, static.depth) == (32, 6)
    assert as_shape(FORK, 3).parents == tuple(FORK)
    with pytest.raises(UserError, match="bush"):
        as_shape("bush", 3)


@pytest.mark.parametrize("tree", ["chain", "static", "dynamic", FORK])
def test_the_public_entry_takes_a_tree_by_name_or_by_parents(tree):
    target = tiny_target()
    draft = DraftLM.from_target_blocks(target, [0, 1, 2])
    plain = speculative_decode(target, None, [7, 8, 9], max_new_tokens=12)
    assert speculative_decode(target, draft, [7, 8, 9], 3, max_new_tokens=12, tree=tree).tokens == plain.tokens


def measured(given, drafter=None):
    target = tiny_target()
    drafter = drafter or LMDrafter(DraftLM.from_target_blocks(target, [0, 1, 2]))
    rng = np.random.default_rng(0)
    texts = {"code": [rng.integers(6, 100, 6).tolist() for _ in range(4)]}
    return evaluate(target, drafter, texts, EvalSettings(**SMALL, **given), PlainRuns())


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"tree": "static", "tree_nodes": 9}, "static-9"),
        ({"tree": "dynamic", "tree_nodes": 9, "tree_width": 3}, "dynamic-9"),
        ({"tree": "optimal", "tree_nodes": 6, "tree_width": 2}, "optimal-6"),
        ({"tree": FORK}, "parents-4"),
    ],
)
def test_results_name_the_tree_and_are_those_of_the_tree(given, name):
    chain, tree = measured({}), measured(given)
    assert [entry["tree"] for entry in tree] == [name, name]
    assert tree[0]["identical"] == [4, 4]
    assert [e["verifies"] for e in tree] != [e["verifies"] for e in chain]


def test_a_drafter_with_a_tree_of_its_own_is_not_said_to_have_drafted_another():
    assert measured({"tree": "dynamic", "tree_nodes": 9}, PromptLookup())[0]["tree"] == "chain"


def test_min_confidence_ends_chains_early_and_changes_no_greedy_token():
    unsure = measured({"min_confidence": 0.05})
    assert unsure[0]["identical"] == [4, 4]
    assert unsure[0]["acceptance_rate"]["count"] < measured({})[0]["acceptance_rate"]["count"]


def test_the_best_tree_for_the_oracle_is_a_chain():
    target = tiny_target()
    settings = EvalSettings(K=3, tree="optimal", tree_nodes=3)
    shape = shape_for(target, LMDrafter(target), [[7, 8, 9]], settings, 0.0, Writer(target))
    assert isinstance(shape, Static)
    assert shape.parents == chain_shape(3).parents
