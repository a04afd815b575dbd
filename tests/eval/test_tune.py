"""The tuner: predictions by hand arithmetic, limits and gates from costs that are stated, and the account of a whole run."""

import numpy as np
import pytest
from kit import near_copy, tiny_target

from draftsmith.errors import UserError
from draftsmith.eval.costs import PLAIN, GivenCosts, MeasuredCosts, Timing, describe
from draftsmith.eval.decode import Decoding, decode
from draftsmith.eval.drafters import LMDrafter, NoDraft, PromptLookup
from draftsmith.eval.replay import Replayed, record
from draftsmith.eval.sampling import Sampler
from draftsmith.eval.settings import EvalSettings
from draftsmith.eval.tree import Dynamic, chain_shape, level_shape
from draftsmith.eval.tune import Tuner
from draftsmith.eval.tune_predict import Candidate, Prediction, candidates, predict, rank, runtime_rules
from draftsmith.eval.tune_settings import StatedCosts, TuneSettings

STATED = StatedCosts(target_step_ms=20, draft_step_ms=1, verify_ms={1: 20, 5: 22, 9: 26}, overhead_ms=0.5)
STEPS = {"prompt-lookup": 0, "medusa": 1}
SMALL = {
    "K": 4,
    "depth": 3,
    "budgets": (4, 8, 15),
    "widths": (3,),
    "temperatures": (0.0, 1.0),
    "prompts": 2,
    "timed_prompts": 2,
}
EVALUATION = EvalSettings(max_new_tokens=12)


def prompts():
    rng = np.random.default_rng(0)
    return [rng.integers(6, 100, int(n)).tolist() for n in rng.integers(2, 20, 4)]


def run(target, drafter, shape, sampler, texts):
    return decode(
        target, drafter, texts, Decoding(shape=shape, sampler=sampler, max_new_tokens=12, eos_ids=frozenset())
    )


def traced(drafter, temperature=0.0, depth=4, **more):
    target = tiny_target()
    plain = run(target, NoDraft(), chain_shape(1), Sampler(temperature), prompts())
    return record(target, drafter, plain, Sampler(temperature), depth=depth, **more)


def test_predicted_time_is_verifies_times_draft_verify_and_overhead_over_tokens_times_a_plain_step():
    trace, costs = traced(LMDrafter(near_copy())), GivenCosts(STATED, STEPS)
    for shape, cycle in (
        (chain_shape(4), 4 * 1 + 22.5),
        (chain_shape(1), 1 + 20.5 + 0.5),
        (level_shape([2, 3]), 2 + 26.5),
    ):
        found = predict(Candidate("d", shape, False), trace, costs)
        expected = trace.lengths.sum() * 20 / (found.replayed.verifies.sum() * cycle)
        assert found.speedup()["value"] == pytest.approx(expected)
        assert found.speedup([0])["value"] == pytest.approx(
            trace.lengths[0] * 20 / (found.replayed.verifies[0] * cycle)
        )


def test_a_verify_of_prompt_lookup_costs_what_was_found_for_it():
    """Added up over the verifies of a real decoding: a node count, and with it a cost, per verify."""
    target, texts = tiny_target(), [[9, 8, 7] * 4, [5, 6] * 5, [11, 12, 13, 14, 15]]
    plain = run(target, NoDraft(), chain_shape(1), Sampler(0.0), texts)
    trace, costs = record(target, PromptLookup(), plain, Sampler(0.0), depth=4), GivenCosts(STATED, STEPS)
    decoded = run(target, PromptLookup(), chain_shape(4), Sampler(0.0), texts)
    sizes = [v.drafted for r in decoded for v in r.trace]
    assert len(set(sizes)) > 1
    spent = sum(float(costs.verify("prompt-lookup", size + 1)[0]) for size in sizes)
    found = predict(Candidate("prompt-lookup", chain_shape(4), False), trace, costs)
    assert found.speculative.sum() == pytest.approx(spent)


def test_stated_costs_are_interpolated_and_not_extended():
    costs = GivenCosts(STATED, STEPS)
    assert costs.verify("d", 3)[0] == pytest.approx(0.0215)
    assert costs.plain()[0] == pytest.approx(0.02)
    steps = {name: costs.draft(name, chain_shape(4))[0] for name in ("d", "medusa", "prompt-lookup")}
    assert steps == pytest.approx({"d": 0.004, "medusa": 0.001, "prompt-lookup": 0.0})
    with pytest.raises(KeyError):
        costs.verify("d", 10)
    ranked = rank({"d": traced(LMDrafter(near_copy()), pools=[(3, 1.0)])}, costs, TuneSettings(**SMALL))
    assert ranked
    assert max(p.candidate.shape.nodes for p in ranked) == 8


def test_measured_costs_come_from_the_timings_by_interpolation_and_by_level():
    def timing(draft, verify, nodes, start=9.0, length=10.0):
        return Timing(
            [draft, 3 * draft], [verify] * 2, [0.5] * 2, [7.0] * 2, [start, start + 2], [length, length + 10], nodes
        )

    tree = Dynamic(4, 5, 15)
    costs = MeasuredCosts(
        {
            (PLAIN, None): timing(0.0, 10.0, 1.0, start=7.0),
            ("d", chain_shape(1)): timing(1.0, 12.0, 2.0),
            ("d", chain_shape(3)): timing(3.0, 14.0, 4.0),
            ("d", tree): timing(9.0, 20.0, 16.0),
            ("other", chain_shape(3)): timing(2.0, 24.0, 4.0),
            ("prompt-lookup", chain_shape(3)): timing(0.0, 11.0, 1.7),  # offered less: says nothing of 4 tokens
        }
    )
    assert costs.plain().tolist() == [10.5]
    assert costs.verify("d", 4).tolist() == [14.5, 14.5]
    assert costs.verify("d", 10).tolist() == [17.5, 17.5]
    assert costs.verify("other", 4).tolist() == [24.5, 24.5]
    assert costs.verify("prompt-lookup", 4).tolist() == [19.5, 19.5], "of all drafts, since none was timed without"
    assert costs.draft("d", chain_shape(2)).tolist() == [2.0, 6.0]
    assert costs.draft("d", tree).tolist() == [9.0, 27.0]
    assert costs.cycle("d", tree).tolist() == [29.5, 47.5]
    assert costs.draft("d", Dynamic(4, 3, 8)).tolist() == [1 + 2 * 2, 3 + 2 * 6]
    assert costs.start("d", np.array([10, 15])).ravel() == pytest.approx([9.0, 10.0])
    assert costs.start(PLAIN, np.array([20])).ravel() == pytest.approx([9.0])
    for unknown in (Dynamic(5, 3, 8), level_shape([2, 2]), chain_shape(4)):
        with pytest.raises(KeyError):
            costs.draft("d", unknown)


def test_what_is_tried_at_each_temperature():
    settings = TuneSettings(**SMALL)
    cold = list(candidates("d", traced(LMDrafter(near_copy()), pools=[(3, 1.0)]), settings))
    assert {c.family for c in cold} == {"chain", "static", "dynamic"}
    assert not any(c.sampled for c in cold)
    assert [c.shape.depth for c in cold if c.family == "chain"] == [1, 2, 3, 4]
    assert len(cold) == len(set(cold))
    hot = list(candidates("d", traced(LMDrafter(near_copy()), 1.0, siblings=4), settings))
    assert {(c.family, c.sampled) for c in hot} == {(f, s) for f in ("chain", "static") for s in (True, False)}
    assert {c.family for c in candidates("prompt-lookup", traced(PromptLookup()), settings)} == {"chain"}


def test_the_rules_at_run_time_follow_from_costs_and_scatter():
    """A verify costs 1.5 plain steps: half a token per verify must be accepted, of 4 drafted ones."""
    verifies, accepted = np.array([40.0]), np.array([80.0])
    replayed = Replayed(np.array([[40.0]]), np.array([120]), accepted, squares=np.array([40 * (2.0**2 + 1.5**2)]))
    plain, cycle = 0.02, 0.03
    found = Prediction(
        Candidate("d", chain_shape(4), False),
        replayed,
        verifies[:, None] * np.array([[cycle]]),
        np.array([[120 * plain]]),
        np.zeros((1, 1)),
        np.zeros((1, 1)),
    )
    rules = runtime_rules(found, GivenCosts(STATED, STEPS), 1.0, 8)
    assert rules["break_even"] == pytest.approx(0.5 / 4)
    assert rules["window"] == 50  # (3 · 1.5 / 1.5)² = 9 would do, and is too few to trust
    assert rules["retry_after"] == 50 * 0.5 / 0.02
    close = replayed.__class__(replayed.visits, replayed.tokens, np.array([26.0]), np.array([26.0 * 2]))
    assert (
        50
        < runtime_rules(
            Prediction(found.candidate, close, found.speculative, found.plain, found.start, found.start_plain),
            GivenCosts(STATED, STEPS),
            1.0,
            8,
        )["window"]
        <= 1000
    )


def tuned(costs, drafters=None, say=lambda line: None, **changes):
    settings = TuneSettings(**(SMALL | {"costs": costs, "batches": tuple(c.batch for c in costs)} | changes))
    texts = prompts()
    return Tuner(
        tiny_target(),
        drafters or {"d": LMDrafter(near_copy())},
        {"a": texts[:2], "b": texts[2:]},
        settings,
        EVALUATION,
        say,
    ).run()


def test_a_plan_from_stated_costs_is_right_where_it_is_decoded_and_knows_its_limits():
    dear = StatedCosts(batch=8, target_step_ms=20, draft_step_ms=1, verify_ms={2: 60, 16: 200})
    document = tuned([StatedCosts(target_step_ms=20, draft_step_ms=1, verify_ms={16: 24}), dear])
    assert len(document["verified"]) == 3
    for entry in document["verified"]:
        assert entry["tokens_per_verify_error"] == pytest.approx(0, abs=1e-9)
        assert entry["speedup"] == {}
    speeds = [entry["speedup_predicted"]["value"] for entry in document["candidates"]]
    assert speeds == sorted(speeds, reverse=True)
    assert document["chosen"]["pays"]
    assert [entry["pays"] for entry in document["batches"]] == [True, False]
    assert document["runtime"]["most_batch"] == 1
    assert [entry["temperature"] for entry in document["temperatures"]] == [0.0, 1.0]
    assert document["workload"]["prompts"] == {"a": 2, "b": 2}
    assert document["unseen"] == {}


def test_the_temperature_that_is_chosen_for_is_among_those_that_are_measured():
    document = tuned([StatedCosts(target_step_ms=20, draft_step_ms=1, verify_ms={16: 24})], temperatures=(1.0,))
    assert [entry["temperature"] for entry in document["temperatures"]] == [0.0, 1.0]
    assert document["chosen"]["pays"]
    assert document["runtime"]["most_temperature"] >= 0


@pytest.mark.parametrize(("draft_ms", "measured"), [(15, 1.2), (1, 0.8)])
def test_what_was_timed_for_real_decides_whatever_was_predicted_for_its_temperature_and_batch(
    draft_ms, measured, monkeypatch
):
    """The choice and the rules at run time then say the same."""
    timed = {"speedup": {"value": measured, "low": measured - 0.1, "high": measured + 0.1, "count": 4}}
    monkeypatch.setattr(Tuner, "_verify", lambda self, predictions: [timed])
    costs = [StatedCosts(target_step_ms=20, draft_step_ms=draft_ms, verify_ms={16: 24 * draft_ms})]
    document = tuned(costs, temperatures=(0.0,), prompts=1, verified=1)
    assert (document["candidates"][0]["speedup_predicted"]["low"] > 1) != (measured > 1), "prediction and timing differ"
    assert document["chosen"]["pays"] == (measured > 1)
    [heat], [batch] = document["temperatures"], document["batches"]
    assert heat["pays"] == heat["greedy"]["pays"] == batch["pays"] == (measured > 1)
    limits = (document["runtime"]["most_temperature"], document["runtime"]["most_batch"])
    assert limits == ((0.0, 1) if measured > 1 else (-1.0, 0))


def test_where_nothing_pays_the_rules_refuse_everything():
    document = tuned(
        [StatedCosts(target_step_ms=20, draft_step_ms=15, verify_ms={16: 300})], temperatures=(0.0,), prompts=1
    )
    assert not document["chosen"]["pays"]
    assert document["unseen"]["prompts"] == 2
    assert document["unseen"]["tokens_per_verify"]["value"] >= 1
    assert document["runtime"]["most_batch"] == 0
    assert document["runtime"]["most_temperature"] == -1


def test_a_sampled_plan_decodes_what_it_predicts_within_its_interval():
    """Twelve tokens of two prompts, twice: a wide bound, which a wrong rule (tokens per verify of 1 or of K + 1) misses."""
    said: list[str] = []
    document = tuned(
        [StatedCosts(target_step_ms=20, draft_step_ms=1, verify_ms={16: 24})],
        say=said.append,
        temperature=1.0,
        temperatures=(1.0,),
        verified=1,
    )
    assert any("dynamic trees" in line for line in said), "what was not scored is named"
    [entry] = document["verified"]
    assert entry["drafting"] == "sampled"
    assert entry["predicted_tokens_per_verify"] == pytest.approx(entry["measured_tokens_per_verify"]["value"], rel=0.4)


def test_without_a_draft_that_could_serve_it_is_one_line():
    with pytest.raises(UserError, match=r"evaluation\.drafts"):
        Tuner(tiny_target(), {}, {"a": prompts()}, TuneSettings(), EVALUATION)


def test_prompts_that_leave_no_room_for_the_longest_draft_are_left_out_and_without_others_it_is_one_line():
    target, drafts = tiny_target(), {"prompt-lookup": PromptLookup()}
    settings = TuneSettings(K=8, depth=6)  # 256 tokens of context, 12 new ones: 236 are left
    assert Tuner(target, drafts, {"a": [[7] * 237, [7] * 236]}, settings, EVALUATION).prompts == [[7] * 236]
    with pytest.raises(UserError, match="236 tokens"):
        Tuner(target, drafts, {"a": [[7] * 237]}, settings, EVALUATION)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"costs": [STATED, STATED]}, "batch 1 is stated twice"),
        ({"costs": [STATED], "batches": [2]}, "none is stated for batch 2"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        TuneSettings(**fields)


def test_shapes_have_names():
    assert describe(chain_shape(5)) == "chain of 5"
    assert describe(level_shape([2, 2])) == "static tree of 6, depth 2"
    assert describe(Dynamic(4, 3, 15, 0.5)) == "dynamic tree of 15, width 4, depth 3, confidence temperature 0.5"


def test_the_tests_draft_is_neither_perfect_nor_useless():
    target = tiny_target()
    decoded = run(target, LMDrafter(near_copy()), chain_shape(4), Sampler(0.0), prompts())
    verifies = [v for r in decoded for v in r.trace]
    assert 0 < sum(v.accepted for v in verifies) < 4 * len(verifies)
