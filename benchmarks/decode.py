"""`make bench-decode`: the decoder against `transformers`, trees against chains, predicted against measured speed, and exactness.

Everything is timed in this process, the sides in turn on every prompt; a ratio's interval is bootstrapped over prompts. Reads a
finished run (runs/demo) and writes docs/studies/decode.json and the page made from it.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from draftsmith.data.rows import Rows
from draftsmith.environment import describe_environment
from draftsmith.eval.acceptance import held_out_prompts
from draftsmith.eval.decode import Decoding, decode
from draftsmith.eval.drafters import Drafter, EagleDrafter, LMDrafter, NoDraft
from draftsmith.eval.exactness import first_token_law
from draftsmith.eval.metrics import metrics, ratio
from draftsmith.eval.replay import profile, record
from draftsmith.eval.sampling import Sampler
from draftsmith.eval.settings import EvalSettings
from draftsmith.eval.timing import Run
from draftsmith.eval.tree import Dynamic, Shape, as_shape, chain_shape, optimal_shape
from draftsmith.files import publish_json, publish_text
from draftsmith.models.draft import DraftLM
from draftsmith.models.eagle import EagleHead
from draftsmith.models.target import Target

sys.path.insert(0, str(Path(__file__).parent))
from decode_page import page
from decode_timing import Costs, ForwardTimes, forwards_of, ours, pace, paired, predict, transformers_greedy, watched
from twin import heavy_twin

K, DEPTH, TREE = 5, 6, 32
NODES = (1, 4, K + 1, 8, 16, 32, 64)


class Size(NamedTuple):
    """How much is measured. timed: prompts whose decoding is timed; tuning: prompts on which shapes are chosen; trees: prompts on
    which trees are compared; tokens: decoded for each; draws: of the first token; twin: how many times the target it costs."""

    timed: int
    tuning: int
    trees: int
    tokens: int
    draws: int
    twin: float


FULL, QUICK = Size(12, 12, 36, 48, 4000, 12.0), Size(2, 1, 4, 20, 100, 1.5)


class Study:
    """Rows of the study, printed as they come."""

    def __init__(self, size: Size) -> None:
        self.size = size
        self.rows: list[dict[str, Any]] = []

    def add(self, what: str, interval: dict[str, float], goal: str = "", **settings: Any) -> None:
        """goal: such as ">= 1.3" or "< 0.01"."""
        row: dict[str, Any] = {"what": what, **interval, "settings": settings}
        if goal:
            sign, bound = goal.split()
            row |= {"goal": goal, "met": {">=": float.__ge__, "<": float.__lt__}[sign](interval["value"], float(bound))}
        self.rows.append(row)
        bounds = f" [{interval['low']:.3f}, {interval['high']:.3f}]" if "low" in interval else ""
        print(f"{what}: {interval['value']:.4g}{bounds} {settings} {goal} {row.get('met', '')}", flush=True)


def against_transformers(
    study: Study, name: str, target: Target, draft: DraftLM, texts: list[list[int]], goal: str, rounds: int
) -> None:
    """Our plain decoding against `generate`, our chain against assisted generation with the same draft and K."""
    assistant, tokens, chain = draft.model, study.size.tokens, chain_shape(K)
    assistant.generation_config.num_assistant_tokens = K
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    seconds = paired(
        texts,
        {
            "plain": lambda text: ours(target, NoDraft(), text, chain, tokens).tokens,
            "generate": lambda text: transformers_greedy(target, text, tokens),
            "chain": lambda text: ours(target, LMDrafter(draft), text, chain, tokens).tokens,
            "assisted": lambda text: transformers_greedy(target, text, tokens, assistant),
        },
        rounds,
    )
    settings = {"target": name, "K": K, "prompts": len(texts), "tokens": tokens, "temperature": 0.0}
    over_generate = ratio(seconds["generate"], seconds["plain"])
    over_assisted = ratio(seconds["assisted"], seconds["chain"])
    study.add("plain decoding, tokens/s, ours over generate", over_generate, ">= 1.0", **settings)
    study.add("chain, tokens/s, ours over assisted generation", over_assisted, goal, **settings)


def speed(
    study: Study,
    name: str,
    target: Target,
    drafters: dict[str, Drafter],
    texts: list[list[int]],
    light: Target | None = None,
) -> Costs:
    """Measured speed-up over plain decoding, what the costs predict, and the share of time inside model forwards: for chains of K
    and, of a heavy twin, for the shape that is predicted to be fastest on other prompts, decoded with the `light` target."""
    heavy = light is not None
    tokens, tuning = study.size.tokens, study.size.tuning
    costs = Costs(target, NODES)
    middle = len(texts[0]) + tokens // 2
    costs.measure(middle)
    sides: dict[tuple[str, str], Shape] = {}
    for draft, drafter in drafters.items():
        sides[draft, f"chain of {K}"] = chain_shape(K)
        if light is not None:
            best, shape = fastest(light, drafter, texts[:tuning], costs, tokens)
            if shape != chain_shape(K):
                sides[draft, f"{best}, chosen on {tuning} other prompts"] = shape
    plain: list[Run] = []
    runs: dict[tuple[str, str], list[Run]] = {side: [] for side in sides}
    for text in texts[tuning:]:
        plain.append(watched(target, NoDraft(), text, chain_shape(1), tokens))
        for (draft, tree), shape in sides.items():
            runs[draft, tree].append(watched(target, drafters[draft], text, shape, tokens))
            if runs[draft, tree][-1].results[0].tokens != plain[-1].results[0].tokens:
                raise RuntimeError(f"{draft}, {tree}: not what plain decoding gives")
        costs.measure(middle)
    order = list(sides)
    for place, (draft, tree) in enumerate(order):
        found, shape = runs[draft, tree], sides[draft, tree]
        settings = {"target": name, "draft": draft, "tree": tree, "domain": "code", "temperature": 0.0}
        chosen = heavy and draft not in [other for other, _ in order[place + 1 :]]
        report_speed(study, plain, found, shape, costs, ">= 1.8" if chosen else "", settings)
        share = inside_forwards(target, drafters[draft], texts[tuning:], shape, tokens)
        study.add("share of time inside model forwards", {"value": share}, ">= 0.95" if heavy else "", **settings)
    return costs


def report_speed(
    study: Study,
    plain: list[Run],
    found: list[Run],
    shape: Shape,
    costs: Costs,
    goal: str,
    settings: dict[str, Any],
) -> None:
    """The speed-up of one draft and shape, whole, and without prefill against what the costs predict."""
    measured = ratio(np.array([run.seconds for run in plain]), np.array([run.seconds for run in found]))
    study.add("speed-up over plain decoding", {**measured, "count": len(found)}, goal, **settings)
    predicted = predict(found, costs, shape.nodes + 1)
    steady, own = (np.array([pace(run) for run in side]) for side in (plain, found))
    about = {
        "predicted": round(predicted.speedup, 3),
        "measured": round(float(steady.sum() / own.sum()), 3),
        "tokens_per_verify": round(predicted.tokens_per_verify, 3),
        "verify_cost": round(predicted.verify_cost, 3),
        "draft_cost": round(predicted.proposal / shape.depth, 4),
    }
    share = {**ratio(steady / predicted.speedup, own), "count": len(found)}
    study.add("speed-up, measured over predicted", share, ">= 0.9", **about, **settings)


def inside_forwards(target: Target, drafter: Drafter, texts: list[list[int]], shape: Shape, tokens: int) -> float:
    """Share of the decoding time of these prompts that is spent in the target's and the draft's forwards."""
    with ForwardTimes((target, "forward"), *forwards_of(drafter)) as inside:
        started = time.perf_counter()
        for text in texts[:4]:
            ours(target, drafter, text, shape, tokens)
        return sum(inside.calls) / (time.perf_counter() - started)


def fastest(target: Target, drafter: Drafter, texts: list[list[int]], costs: Costs, tokens: int) -> tuple[str, Shape]:
    """The shape with the largest predicted speed-up on these prompts, at these costs. target: of the same function as the one that
    the costs are of, so the small target counts what the heavy twin accepts."""
    how = Decoding(chain_shape(1), Sampler(0.0), tokens, eos_ids=frozenset())
    ranks = profiled(target, drafter, texts, how, 4)
    shapes: dict[str, Shape] = {f"chain of {k}": chain_shape(k) for k in (2, 3, 4, K, 7)}
    shapes |= {f"static tree of {n}": optimal_shape(ranks, n) for n in (7, 15, 31)}
    shapes |= {
        f"dynamic tree of {n}, depth {d}, confidence temperature {c:g}": Dynamic(4, d, n, c)
        for n, d in ((7, 4), (15, 5), (15, 6), (23, 6), (31, 6))
        for c in (1.0, 0.25)
    }
    predicted = {
        name: predict([watched(target, drafter, text, shape, tokens) for text in texts], costs, shape.nodes + 1).speedup
        for name, shape in shapes.items()
    }
    best = max(predicted, key=lambda name: predicted[name])
    print({name: round(value, 3) for name, value in predicted.items()}, flush=True)
    return best, shapes[best]


def profiled(
    target: Target, drafter: Drafter, texts: list[list[int]], how: Decoding, siblings: int
) -> list[list[float]]:
    """How often a child of each rank is accepted at each depth, along what plain decoding writes."""
    trace = record(target, drafter, decode(target, NoDraft(), texts, how), how.sampler, depth=DEPTH, siblings=siblings)
    return profile(trace, siblings, how.sampler.temperature > 0)


def trees(study: Study, target: Target, drafter: Drafter, texts: list[list[int]]) -> None:
    """Tokens per verify of a chain, the best static tree for the head's own profile, and a dynamic tree, of equal depth."""
    tuning, held = texts[: len(texts) // 4], texts[len(texts) // 4 :]  # shapes are chosen on the former
    for temperature in (0.0, 1.0):
        how = Decoding(chain_shape(DEPTH), Sampler(temperature), study.size.tokens, eos_ids=frozenset())
        sharpest = (
            1.0 if temperature else max((1.0, 0.5, 0.25), key=lambda t: of_dynamic(target, drafter, tuning, t, how))
        )
        shapes: dict[str, Shape] = {
            f"chain of {DEPTH}": chain_shape(DEPTH),
            f"static tree of {TREE}": optimal_shape(profiled(target, drafter, tuning, how, 8), TREE),
            f"dynamic tree of {TREE}": Dynamic(8, DEPTH, TREE, sharpest),
        }
        found = []
        for name, shape in shapes.items():
            results = decode(target, drafter, held, decoding(how, shape))
            found.append(np.array([float(len(r.trace)) for r in results]))
            tau = metrics([result.trace for result in results], DEPTH)["tokens_per_verify"]
            about = {"draft": "eagle3", "depth": DEPTH, "temperature": temperature, "prompts": len(held)}
            if isinstance(shape, Dynamic) and not temperature:
                about["confidence_temperature"] = sharpest
            study.add("tokens per verify", tau, tree=name, **about)  # type: ignore[arg-type]
        chain, static, dynamic = found
        pairs = (("static tree over chain", static, chain), ("dynamic tree over chain", dynamic, chain))
        for what, a, b in (*pairs, ("dynamic over static tree", dynamic, static)):
            study.add(f"tokens per verify, {what}", ratio(b, a), ">= 1.0", temperature=temperature, nodes=TREE)


def decoding(how: Decoding, shape: Shape) -> Decoding:
    return Decoding(shape, how.sampler, how.max_new_tokens, how.seed, how.eos_ids)


def of_dynamic(target: Target, drafter: Drafter, texts: list[list[int]], sharpness: float, how: Decoding) -> float:
    results = decode(target, drafter, texts, decoding(how, Dynamic(8, DEPTH, TREE, sharpness)))
    return sum(len(r.tokens) for r in results) / sum(len(r.trace) for r in results)


def first_tokens(study: Study, target: Target, drafters: dict[str, Drafter], text: list[int]) -> None:
    """The first token's law at T = 1 against p, for chains and trees."""
    cases = [(draft, "chain") for draft in drafters] + [("eagle3", "static"), ("eagle3", "dynamic")]
    for draft, tree in cases:
        shape = as_shape(tree, 2, nodes=8, width=4)
        for sampler in (Sampler(1.0, top_k=20), Sampler(1.0)):
            law = first_token_law(target, drafters[draft], text, sampler, study.size.draws, shape=shape)
            about = {"draft": draft, "tree": tree, "temperature": 1.0, "draws": law.draws, "outcomes": law.outcomes}
            if sampler.top_k:
                noise = {"top_k": sampler.top_k, "expected_of_equal_laws": round(law.kl_expected, 5)}
                study.add("first token, KL against p", {"value": law.kl}, "< 0.01", **about, **noise)
            share = {"value": law.tv / law.tv_expected}
            study.add("first token, TV over that of equal laws", share, "< 1.3", tv=round(law.tv, 4), **about)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, nargs="?", default=Path("runs/demo"))
    parser.add_argument(
        "--quick", action="store_true", help="a few tokens of two prompts: that it runs, not what it shows"
    )
    parser.add_argument(
        "--docs", type=Path, help="folder of the page and its numbers; docs, or runs/bench-decode if quick"
    )
    arguments = parser.parse_args()
    docs: Path = arguments.docs or Path("runs/bench-decode" if arguments.quick else "docs")
    run, study = arguments.run, Study(QUICK if arguments.quick else FULL)
    size = study.size
    target = Target.load(run / "target")
    twin = heavy_twin(target, size.twin)
    rows = Rows.open(run / "rows", "held_out")
    settings = EvalSettings(domains=("code",), prompts=max(size.trees, size.timed + size.tuning), max_new_tokens=48)
    texts = held_out_prompts(rows, settings, target.context)["code"]
    draft = DraftLM.load(run / "draft" / "distilled", target)
    head = EagleHead.load(run / "eagle" / "eagle3", target)
    drafters: dict[str, Drafter] = {"distilled": LMDrafter(draft), "eagle3": EagleDrafter(head)}
    some = texts[: size.timed]
    against_transformers(study, "demo target", target, draft, some, ">= 1.3", rounds=2)
    against_transformers(study, "heavy twin", twin, draft, some, ">= 1.05", rounds=1)
    few = texts[: size.tuning + size.timed]
    for name, model in (("demo target", target), ("heavy twin", twin)):
        costs = speed(study, name, model, drafters, few, light=target if model is twin else None)
        for n in NODES:
            about = {"target": name, "nodes": n, "milliseconds": round(1000 * costs.of(n), 2)}
            study.add("verify_cost", {"value": costs.verify_cost(n), "count": len(costs.seconds[n])}, **about)
    trees(study, target, drafters["eagle3"], texts[: size.trees])
    first_tokens(study, target, drafters, texts[0][:3])
    environment = describe_environment()
    study_file = {"environment": environment, "command": "make bench-decode", "rows": study.rows}
    publish_json(docs / "studies" / "decode.json", study_file)
    publish_text(docs / "decoding.md", page(study.rows, environment))


if __name__ == "__main__":
    main()
