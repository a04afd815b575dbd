"""Choose a draft and how to use it, for this target on this workload: record once, replay every setting, time, predict, then check.

`Tuner.run` is the whole of it and returns a JSON document; what it says to people and engines is `draftsmith.eval.skill`'s. Knows
drafters and prompts; the run folder's files are somebody else's.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from draftsmith.errors import UserError
from draftsmith.eval.costs import FILLER, Costs, GivenCosts, MeasuredCosts, describe, measure
from draftsmith.eval.decode import Decoded, Decoding, decode
from draftsmith.eval.drafters import Drafter, MedusaDrafter, NoDraft
from draftsmith.eval.gate import reached
from draftsmith.eval.metrics import paired_ratio, ratio
from draftsmith.eval.replay import Trace, record
from draftsmith.eval.sampling import Sampler
from draftsmith.eval.settings import EvalSettings
from draftsmith.eval.timing import ROUNDS, timed
from draftsmith.eval.tree import Dynamic, Shape, chain_shape
from draftsmith.eval.tune_predict import Prediction, candidates, pays, rank, runtime_rules
from draftsmith.eval.tune_settings import TuneSettings
from draftsmith.models.target import Target

LOOKUP = "prompt-lookup"
SIBLINGS = 4  # sampled children of a node at most
TIMED_NODES = 256  # tokens of one timed forward at most, over the whole batch
DRAWS = 4  # of every prompt's text above temperature 0, where they are compared with a prediction
SHOWN = 20  # candidates that the document lists


class Tuner:
    """One target, its drafts and a workload. prompts: token ids by domain; the first `settings.prompts` of each are used."""

    def __init__(
        self,
        target: Target,
        drafters: Mapping[str, Drafter],
        prompts: Mapping[str, Sequence[Sequence[int]]],
        settings: TuneSettings,
        evaluation: EvalSettings,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        if not drafters:
            raise UserError("evaluation.drafts: none that could serve; name a trained draft or prompt-lookup")
        self.target, self.drafters, self.settings, self.evaluation, self.say = (
            target,
            drafters,
            settings,
            evaluation,
            say,
        )
        room = target.context - evaluation.max_new_tokens - max(settings.K, settings.depth)
        prompts = {domain: [text for text in texts if len(text) <= room] for domain, texts in prompts.items()}
        if not any(prompts.values()):
            raise UserError(
                f"tune.K, tune.depth: no prompt has at most {room} tokens, which is the room that they leave"
            )
        self.domains = [domain for domain, texts in prompts.items() for _ in texts[: settings.prompts]]
        self.prompts = [list(text) for texts in prompts.values() for text in texts[: settings.prompts]]
        more = [list(text) for texts in prompts.values() for text in texts[settings.prompts : 2 * settings.prompts]]
        self._known = self.prompts + more  # the choice is made on the first ones and looked at on the others
        self._started = time.monotonic()

    def run(self) -> dict[str, Any]:
        """The document (schema 1): workload, costs, ranked settings, the best decoded for real, gates, limits, runtime rules."""
        hottest, first = self.settings.temperature, self.settings.batches[0]
        traces = {name: self._record(name, hottest, pools=self._pools) for name in self.drafters}
        if hottest > 0 and any(trace.places for trace in traces.values()):
            self._say(
                "dynamic trees are scored with the draft's likeliest children; with sampled ones they cannot be replayed"
            )
        costs = self._costs(first, self._shapes(traces), hottest > 0)
        ranked = rank(traces, costs, self.settings)
        if not ranked:
            raise UserError("tune: no setting has both recordings and costs; state verify_ms for more nodes")
        self._say(f"{len(ranked)} settings scored; best {_line(ranked[0])}")
        verified = self._verify(ranked[: self.settings.verified]) if self.settings.verified else []
        place = max(range(len(verified)), key=lambda i: verified[i]["speedup"].get("value", -i), default=0)
        best = ranked[place]
        judged = (verified[place]["speedup"] if verified else {}) or best.speedup()
        batches = self._batches(best, traces, costs)
        heat = self._temperatures(best, traces, costs)
        # What was decoded for real has the last word where it was decoded: at this temperature and batch.
        here = [e for e in heat if e["temperature"] == hottest] + [e for e in batches if e["batch"] == first]
        for entry in here:
            entry["pays"] = pays(judged)
        if not best.candidate.sampled:
            here[0]["greedy"]["pays"] = pays(judged)
        gate, limit = reached(heat, "temperature", hottest), reached(batches, "batch", first)
        return {
            "schema": 1,
            "target": {"path": self.target.path, "fingerprint": self.target.fingerprint()},
            "settings": self.settings.model_dump(mode="json"),
            "workload": self._workload(traces),
            "temperature": hottest,
            "batch": first,
            "chosen": _entry(best) | {"speedup": judged, "pays": pays(judged)},
            "verified": verified,
            "unseen": self._unseen(best),
            "candidates": [_entry(prediction) for prediction in ranked[:SHOWN]],
            "families": _families(ranked),
            "by_domain": self._by_domain(best),
            "batches": batches,
            "temperatures": heat,
            "costs": {"stated": bool(self.settings.costs), "rows": costs.table()},
            "runtime": runtime_rules(best, costs, -1.0 if gate is None else gate, int(limit or 0)),
        }

    # Recordings.

    def _record(self, name: str, temperature: float, pools: Sequence[tuple[int, float]] = ()) -> Trace:
        drafter = self.drafters[name]
        depth = max(self.settings.K, self.settings.depth)
        if isinstance(drafter, MedusaDrafter):
            depth = min(depth, drafter.head.config.heads)
        texts = self._texts(temperature)
        trace = record(
            self.target,
            drafter,
            texts,
            self._sampler(temperature),
            depth=depth,
            siblings=SIBLINGS,
            pools=pools,
            seed=self.evaluation.seed,
        )
        self._say(f"recorded {name} at T = {temperature:g} along {trace.lengths.sum():,} tokens")
        return trace

    def _texts(self, temperature: float) -> list[Decoded]:
        """What the target writes by itself, in batches; kept, since every draft is recorded along the same texts."""
        if temperature not in self._written:
            size = self.evaluation.batch
            texts: list[Decoded] = []
            for start in range(0, len(self.prompts), size):
                names = range(start, min(start + size, len(self.prompts)))
                texts += self._decode(NoDraft(), names, chain_shape(1), self._sampler(temperature))
            self._written[temperature] = texts
        return self._written[temperature]

    @cached_property
    def _written(self) -> dict[float, list[Decoded]]:
        return {}

    @property
    def _pools(self) -> list[tuple[int, float]]:
        return [(w, sharp) for w in self.settings.widths for sharp in self.settings.confidence_temperatures]

    def _sampler(self, temperature: float, sampled: bool = True) -> Sampler:
        return Sampler(temperature, self.evaluation.top_k, self.evaluation.top_p, greedy_draft=not sampled)

    # Costs.

    def _shapes(self, traces: Mapping[str, Trace]) -> dict[str, list[Shape]]:
        """What is timed of each draft: short, middling and long chains, its static trees, and the largest tree of each width."""
        shapes: dict[str, list[Shape]] = {}
        for name, trace in traces.items():
            found = list(candidates(name, trace, self.settings))
            chains = _chains(min(self.settings.K, trace.depth))
            static = dict.fromkeys(c.shape for c in found if c.family == "static")
            largest: dict[tuple[int, float], Shape] = {}
            for candidate in found:
                shape = candidate.shape
                if isinstance(shape, Dynamic):
                    largest[shape.width, shape.confidence_temperature] = shape  # depths and budgets rise
            shapes[name] = [*chains, *static, *largest.values()]
        return shapes

    def _costs(self, batch: int, shapes: Mapping[str, Sequence[Shape]], sampled: bool, verifies: int = 8) -> Costs:
        if self.settings.costs:
            [stated] = [entry for entry in self.settings.costs if entry.batch == batch]
            medusa = [name for name, drafter in self.drafters.items() if isinstance(drafter, MedusaDrafter)]
            return GivenCosts(stated, dict.fromkeys(medusa, 1) | {LOOKUP: 0})
        temperature = (self.settings.temperature or 1.0) if sampled else 0.0
        if LOOKUP in shapes:  # it offers what it finds: sizes in between have to be timed without it
            shapes = {**shapes, FILLER: _chains(self.settings.K)}
        timings = measure(
            self.target,
            self.drafters,
            shapes,
            [self.prompts[row] for row in self._in_turn],
            lambda shape: self._sampler(temperature, not isinstance(shape, Dynamic)),
            batch,
            self.settings.repetitions,
            verifies,
        )
        self._say(f"timed {len(timings)} settings at batch {batch}{', sampling' if sampled else ''}")
        return MeasuredCosts(timings)

    def _batches(self, best: Prediction, traces: Mapping[str, Trace], costs: Costs) -> list[dict[str, Any]]:
        """For each batch size what the chosen setting and the best of its draft are predicted to be worth, without prefill."""
        draft, entries = best.candidate.draft, []
        stated = {entry.batch for entry in self.settings.costs}
        for batch in self.settings.batches:
            if batch != self.settings.batches[0]:
                if stated and batch not in stated:
                    continue
                shapes = [*_chains(min(self.settings.K, traces[draft].depth)), best.candidate.shape]
                some = {draft: [shape for shape in dict.fromkeys(shapes) if (shape.nodes + 1) * batch <= TIMED_NODES]}
                if not some[draft]:
                    continue
                costs = self._costs(batch, some, self.settings.temperature > 0, verifies=4)
            found = rank({draft: traces[draft]}, costs, self.settings, whole=False)
            if not found:
                continue
            same = [p for p in found if p.candidate == best.candidate]
            shown = same[0] if same else found[0]
            entries.append(
                {"batch": batch, "chosen": shown.candidate == best.candidate}
                | _entry(shown, whole=False)
                | {"pays": pays(shown.speedup(whole=False)), "best": _entry(found[0], whole=False)}
            )
        return entries

    # Temperatures.

    def _temperatures(self, best: Prediction, traces: Mapping[str, Trace], known: Costs) -> list[dict[str, Any]]:
        """For each temperature the best setting of the chosen draft, and how greedy drafting (engines' default) does beside it."""
        draft, entries = best.candidate.draft, []
        shape = best.candidate.shape
        pools = [(shape.width, shape.confidence_temperature)] if isinstance(shape, Dynamic) else []
        costs = {self.settings.temperature > 0: known}
        for temperature in sorted({*self.settings.temperatures, self.settings.temperature}):
            chosen_for = temperature == self.settings.temperature
            trace = traces[draft] if chosen_for else self._record(draft, temperature, pools)
            sampled = temperature > 0
            if sampled not in costs:
                depth = min(self.settings.K, trace.depth)
                shapes = {draft: list(dict.fromkeys([*_chains(depth), shape]))}
                costs[sampled] = self._costs(self.settings.batches[0], shapes, sampled)
            found = rank({draft: trace}, costs[sampled], self.settings)
            greedy = [p for p in found if not p.candidate.sampled]
            entries.append(
                {"temperature": temperature}
                | _entry(found[0])
                | {"pays": pays(found[0].speedup()), "greedy": _entry(greedy[0]) | {"pays": pays(greedy[0].speedup())}}
            )
        return entries

    # The check.

    def _verify(self, predictions: Sequence[Prediction]) -> list[dict[str, Any]]:
        """Decode for real, plain and with each setting in turn, and compare with what was predicted for the very same prompts."""
        rows, temperature = self._in_turn[: self.settings.timed_prompts], self.settings.temperature
        sides: list[tuple[Drafter, Shape, Sampler]] = [(NoDraft(), chain_shape(1), self._sampler(temperature))]
        for prediction in predictions:
            c = prediction.candidate
            sides.append((self.drafters[c.draft], c.shape, self._sampler(temperature, c.sampled)))
        seconds = np.zeros((len(sides), len(rows), ROUNDS))
        verifies, tokens = np.zeros(seconds.shape[:2]), np.zeros(seconds.shape[:2])
        for turn in range(ROUNDS):
            for i, row in enumerate(rows):
                for side, (drafter, shape, sampler) in enumerate(sides):
                    run = timed(self.target, drafter, [self._known[row]], self._how(shape, sampler), names=[row])
                    [result] = run.results
                    seconds[side, i, turn] = run.seconds / len(result.tokens)
                    verifies[side, i] += len(result.trace)
                    tokens[side, i] += len(result.tokens)
        entries = []
        for side, prediction in enumerate(predictions, 1):
            tau, compared = ratio(tokens[side], verifies[side]), rows
            if temperature > 0:  # these texts are drawn: more of them, untimed and so in batches
                compared = list(range(len(self.prompts)))
                tau = self._decoded_tokens(compared, *sides[side])
            written = tokens[0][:, None]  # above temperature 0 each side's text has a length of its own
            speed = paired_ratio(seconds[0] * written, seconds[side] * written)
            entries.append(self._compared(prediction, compared, tau, rows, {} if self.settings.costs else speed))
        return entries

    def _decode(
        self, drafter: Drafter, rows: Sequence[int], shape: Shape, sampler: Sampler, turn: int = 0
    ) -> list[Decoded]:
        texts = [self._known[row] for row in rows]
        return decode(self.target, drafter, texts, self._how(shape, sampler, turn), names=rows)

    def _how(self, shape: Shape, sampler: Sampler, turn: int = 0) -> Decoding:
        return Decoding(shape, sampler, self.evaluation.max_new_tokens, seed=self.evaluation.seed + turn)

    def _decoded_tokens(self, rows: Sequence[int], drafter: Drafter, shape: Shape, sampler: Sampler) -> Any:
        """Tokens per verify of each prompt's text, or of several that are drawn."""
        tokens, verifies = np.zeros(len(rows)), np.zeros(len(rows))
        for turn in range(1 if sampler.greedy else DRAWS):
            for start in range(0, len(rows), self.evaluation.batch):
                some = slice(start, start + self.evaluation.batch)
                results = self._decode(drafter, rows[some], shape, sampler, turn)
                tokens[some] += [len(result.tokens) for result in results]
                verifies[some] += [len(result.trace) for result in results]
        return ratio(tokens, verifies)

    def _unseen(self, best: Prediction) -> dict[str, Any]:
        """Tokens per verify of the choice on prompts that it was not made on; {} where there are none."""
        candidate = best.candidate
        sampler = self._sampler(self.settings.temperature, candidate.sampled)
        rows = range(len(self.prompts), len(self._known))
        if not rows:
            return {}
        tau = self._decoded_tokens(rows, self.drafters[candidate.draft], candidate.shape, sampler)
        return {"prompts": len(rows), "tokens_per_verify": tau}

    def _compared(
        self, prediction: Prediction, rows: Sequence[int], tau: Any, timed: Sequence[int], speed: dict[str, Any]
    ) -> dict[str, Any]:
        replayed = prediction.replayed
        expected = float(replayed.tokens[rows].sum() / replayed.verifies[rows].sum())
        entry = _entry(prediction) | {
            "prompts": len(rows),
            "predicted_tokens_per_verify": expected,
            "measured_tokens_per_verify": tau,
            "tokens_per_verify_error": expected / float(tau["value"]) - 1,
            "speedup": speed,
        }
        if speed:
            foreseen = prediction.speedup(timed)
            entry |= {"foreseen": foreseen, "speedup_error": foreseen["value"] / speed["value"] - 1}
        self._say(f"decoded {_line(prediction)}: {_checked(entry)}")
        return entry

    @property
    def _in_turn(self) -> list[int]:
        """The prompts as they are timed: the domains in turn."""
        by_domain = [[i for i, d in enumerate(self.domains) if d == domain] for domain in dict.fromkeys(self.domains)]
        return [rows[i] for i in range(max(map(len, by_domain))) for rows in by_domain if i < len(rows)]

    # The account.

    def _by_domain(self, best: Prediction) -> list[dict[str, Any]]:
        found = []
        for domain in dict.fromkeys(self.domains):
            rows = np.array([i for i, d in enumerate(self.domains) if d == domain])
            replayed = best.replayed
            tau = ratio(replayed.tokens[rows].astype(float), replayed.verifies[rows])
            found.append({"domain": domain, "tokens_per_verify": tau, "speedup": best.speedup(rows)})
        return found

    def _workload(self, traces: Mapping[str, Trace]) -> dict[str, Any]:
        lengths = next(iter(traces.values())).lengths
        return {
            "prompts": {domain: self.domains.count(domain) for domain in dict.fromkeys(self.domains)},
            "prompt_tokens": float(np.mean([len(prompt) for prompt in self.prompts])),
            "new_tokens": float(lengths.mean()),
        }

    def _say(self, line: str) -> None:
        self.say(f"tune: {line} ({time.monotonic() - self._started:.0f} s)")


def _chains(longest: int) -> list[Shape]:
    return [chain_shape(K) for K in sorted({1, (longest + 1) // 2, longest})]


def _families(ranked: Sequence[Prediction]) -> list[dict[str, Any]]:
    """The best of each draft and family: what an engine without the chosen kind of tree is given."""
    best: dict[tuple[str, str, float], Prediction] = {}
    for prediction in ranked:
        candidate = prediction.candidate
        sharp = candidate.shape.confidence_temperature if isinstance(candidate.shape, Dynamic) else 1.0
        best.setdefault((candidate.draft, candidate.family, sharp), prediction)
    return [_entry(prediction) for prediction in best.values()]


def _entry(prediction: Prediction, whole: bool = True) -> dict[str, Any]:
    return prediction.candidate.about() | {
        "tokens_per_verify": prediction.tokens_per_verify,
        "speedup_predicted": prediction.speedup(whole=whole),
    }


def _line(prediction: Prediction) -> str:
    candidate, speed = prediction.candidate, prediction.speedup()
    bounds = f"({speed['low']:.2f} to {speed['high']:.2f})"
    return f"{candidate.draft}, {describe(candidate.shape)}: {speed['value']:.2f}× {bounds} predicted"


def _checked(entry: Mapping[str, Any]) -> str:
    tau = f"tokens per verify {entry['measured_tokens_per_verify']['value']:.2f} ({entry['tokens_per_verify_error']:+.1%})"
    return tau + (f", {entry['speedup']['value']:.2f}× ({entry['speedup_error']:+.1%})" if entry["speedup"] else "")
