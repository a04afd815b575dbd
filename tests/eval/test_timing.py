"""The account of time, on a clock that only models move: the parts are the whole, and a prediction is what then happens."""

import numpy as np
import pytest
from kit import near_copy, tiny_target

from draftsmith.errors import UserError
from draftsmith.eval import timing
from draftsmith.eval.costs import FILLER, PLAIN, MeasuredCosts, measure
from draftsmith.eval.decode import Decoding
from draftsmith.eval.drafters import LMDrafter, NoDraft, PromptLookup
from draftsmith.eval.sampling import Sampler
from draftsmith.eval.settings import EvalSettings
from draftsmith.eval.timing import Cycle, Run, Speed, measured_speed, timed
from draftsmith.eval.tree import Dynamic, chain_shape
from draftsmith.eval.tune import Tuner
from draftsmith.eval.tune_settings import TuneSettings

FORWARD, TOKEN = 7.0, 0.5  # seconds of a target's forward, and more of each token that it reads
STEP, READ, REST = 0.25, 0.125, 0.0625  # of a draft's step, of each token of a prompt that it reads, of a verify's rest


class Clock:
    """Shows what the models took. pace: how slow the machine is; of `paces` the next one at every second text."""

    def __init__(self, paces=(1.0,)):
        self.now, self.texts, self.paces = 0.0, 0, paces

    def __call__(self):
        return self.now

    def work(self, seconds):
        self.now += seconds * self.paces[(self.texts - 1) // 2 % len(self.paces)]


class Slow(LMDrafter):
    """`near_copy`, taking a known time."""

    def __init__(self, clock):
        super().__init__(near_copy())
        self.clock = clock

    def begin(self, batch, capacity):
        super().begin(batch, capacity)
        self.fresh = True

    def propose(self, committed, shape, sampler):
        self.clock.work(STEP * shape.depth + READ * self.fresh * (len(committed.tokens[0]) - 1))
        self.fresh = False
        return super().propose(committed, shape, sampler)

    def observe(self, logits):
        self.clock.work(REST)


def slow_target(clock):
    target = tiny_target()
    forward, new_cache = target.forward, target.new_cache

    def slow_forward(ids, *args, **kwargs):
        clock.work(FORWARD + TOKEN * ids.shape[1])
        return forward(ids, *args, **kwargs)

    def counted(*args, **kwargs):
        clock.texts += 1
        return new_cache(*args, **kwargs)

    target.forward, target.new_cache = slow_forward, counted
    return target


@pytest.fixture
def clock(monkeypatch):
    fake = Clock()
    monkeypatch.setattr(timing, "perf_counter", fake)
    return fake


def texts():
    rng = np.random.default_rng(0)
    return [rng.integers(6, 100, n).tolist() for n in (4, 17, 9, 30)]


def how(shape, tokens=12):
    return Decoding(shape, Sampler(0.0), tokens, eos_ids=frozenset())


def plain_seconds(text, tokens):
    return FORWARD + TOKEN * (len(text) - 1) + tokens * (FORWARD + TOKEN)


def drafted_seconds(text, verifies, shape):
    first = FORWARD + (TOKEN + READ) * (len(text) - 1)
    return first + verifies * (STEP * shape.depth + FORWARD + TOKEN * (shape.nodes + 1) + REST)


@pytest.mark.parametrize("most", [None, 3])
def test_the_parts_of_a_run_are_the_whole_of_it(clock, most):
    target, shape, text = slow_target(clock), chain_shape(3), texts()[1]
    run = timed(target, Slow(clock), [text], how(shape), most=most)
    assert len(run.cycles) == (most or len(run.results[0].trace))
    assert run.seconds == clock.now == drafted_seconds(text, len(run.cycles), shape)
    assert run.start == pytest.approx(drafted_seconds(text, 0, shape))
    assert run.cycle == Cycle(4, 3 * STEP, FORWARD + 4 * TOKEN, REST)


def test_costs_do_not_follow_the_pace_of_the_machine_and_keep_settings_apart(clock):
    shapes = {"d": [chain_shape(1), chain_shape(4), Dynamic(3, 2, 5)], FILLER: [chain_shape(2)]}
    found = []
    for paces in ((1.0,), (1.0, 3.0, 1.0, 0.5, 1.0)):
        clock.texts, clock.paces = 0, paces
        target, drafters = slow_target(clock), {"d": Slow(clock)}
        timings = measure(target, drafters, shapes, texts(), lambda shape: Sampler(0.0), 1, repetitions=3, verifies=3)
        assert list(timings) == [(PLAIN, None), *(("d", shape) for shape in shapes["d"]), (FILLER, chain_shape(2))]
        found.append(MeasuredCosts(timings))
    for costs in found:
        assert costs.plain() == pytest.approx(FORWARD + TOKEN)
        for shape in (chain_shape(1), chain_shape(3), Dynamic(3, 2, 5)):
            expected = STEP * shape.depth + FORWARD + TOKEN * (shape.nodes + 1) + REST
            assert costs.cycle("d", shape) == pytest.approx(expected)
        assert costs.verify("prompt-lookup", 3) == pytest.approx(FORWARD + 3 * TOKEN)  # a filler's: without REST
        lengths = np.array([5, 40])
        assert costs.start("d", lengths)[:, 0] == pytest.approx(FORWARD + (TOKEN + READ) * (lengths - 1))
        assert costs.start(PLAIN, lengths)[:, 0] == pytest.approx(FORWARD + TOKEN * (lengths - 1))
        assert len(costs.table()) == 5


def test_a_long_draft_is_timed_on_as_many_verifies_as_the_context_has_room_for(clock):
    target, drafters = slow_target(clock), {"d": Slow(clock)}
    shape = chain_shape(30)  # of 256 tokens: nine verifies of 31 would not fit
    timings = measure(target, drafters, {"d": [shape]}, texts(), lambda shape: Sampler(0.0), 1, repetitions=1)
    assert timings["d", shape].cycle == pytest.approx(30 * STEP + FORWARD + 31 * TOKEN + REST)
    with pytest.raises(UserError, match="100 tokens ahead leave no room"):
        measure(target, drafters, {"d": [chain_shape(100)]}, texts(), lambda shape: Sampler(0.0), 1, repetitions=1)


def test_what_the_tuner_predicts_is_what_it_then_measures_and_what_the_account_gives(clock):
    target, prompts = slow_target(clock), texts()[:2]
    settings = TuneSettings(
        K=3,
        depth=2,
        budgets=(4,),
        widths=(3,),
        temperatures=(0.0,),
        batches=(1,),
        prompts=1,
        repetitions=1,
        verified=8,
    )
    drafters = {"d": Slow(clock), "prompt-lookup": PromptLookup()}
    domains = {"short": prompts[:1], "long": prompts[1:]}
    document = Tuner(target, drafters, domains, settings, EvalSettings(max_new_tokens=12)).run()
    checked = document["verified"]
    assert {(entry["draft"], entry["family"]) for entry in checked} >= {
        *(("d", family) for family in ("chain", "static", "dynamic")),
        ("prompt-lookup", "chain"),
    }
    for entry in checked:
        assert entry["tokens_per_verify_error"] == pytest.approx(0, abs=1e-9)
        assert entry["speedup_error"] == pytest.approx(0, abs=1e-9), entry["tree"]
        assert entry["foreseen"]["value"] == pytest.approx(entry["speedup_predicted"]["value"])
    [entry] = [e for e in checked if (e["draft"], e["tree"]) == ("d", "chain of 2")]
    runs = [timed(target, Slow(clock), [text], how(chain_shape(2))).results[0] for text in prompts]
    plain = sum(plain_seconds(text, 12) for text in prompts)
    own = sum(drafted_seconds(text, len(run.trace), chain_shape(2)) for text, run in zip(prompts, runs, strict=True))
    assert entry["speedup"]["value"] == pytest.approx(plain / own)


def test_a_measured_speed_up_is_taken_within_rounds(clock):
    clock.paces = (1.0, 5.0)
    settings, prompts = EvalSettings(max_new_tokens=12, timed_prompts=4, timed_seconds=1e9), texts()
    speed = measured_speed(slow_target(clock), Slow(clock), prompts, settings, how(chain_shape(3)))
    verifies = [len(rounds[0].cycles) for rounds in speed.drafted]
    plain = sum(plain_seconds(text, 12) for text in prompts)
    own = sum(drafted_seconds(text, n, chain_shape(3)) for text, n in zip(prompts, verifies, strict=True))
    assert speed.speedup()["value"] == pytest.approx(plain / own)


def test_costs_and_the_predicted_speed_up_are_those_of_the_times_given():
    """A plain forward of 10 ms, a verify's of 15 ms, 1 ms beside each, a draft step of 1 ms, K = 5, 3 tokens per verify."""

    class Written:
        tokens = [0] * 30

    plain = Run(0.02, [Cycle(1, 0.0, 0.010, 0.001)] * 30, [Written])
    own = Run(0.04, [Cycle(6, 0.005, 0.015, 0.001)] * 10, [Written])
    found = Speed([[plain] * 2] * 2, [[own] * 2] * 2).metrics(np.array([30.0, 60.0]), np.array([10.0, 20.0]), K=5)
    got = {name: entry["value"] for name, entry in found.items()}
    expected = {"speedup": 0.35 / 0.25, "draft_cost": 0.1, "verify_cost": 1.5, "speedup_predicted": 3 / (1.5 + 5 * 0.1)}
    assert got == pytest.approx(expected)
    assert {entry["count"] for entry in found.values()} == {2}


def test_a_stopwatch_hands_everything_on(clock):
    target = slow_target(clock)
    for drafter in (NoDraft(), PromptLookup(), Slow(clock)):
        run = timed(target, drafter, texts(), how(chain_shape(3)), names=[3, 2, 1, 0])
        assert [len(result.tokens) for result in run.results] == [12] * 4
        assert [result.tokens for result in run.results] == [
            result.tokens for result in timed(target, NoDraft(), texts(), how(chain_shape(1))).results
        ]
