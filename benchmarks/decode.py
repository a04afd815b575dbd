"""`make bench-decode`: the decoder against `transformers`, trees against chains, and predicted against measured speed.

Everything is timed in this process, the sides in turn on every prompt; a ratio's interval is bootstrapped over prompts. Reads a
finished run (runs/demo) and writes docs/studies/decode.json.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftsmith.data.rows import Rows
from draftsmith.environment import describe_environment
from draftsmith.eval.acceptance import held_out_prompts
from draftsmith.eval.decode import Decoded, decode
from draftsmith.eval.drafters import Drafter, EagleDrafter, LMDrafter, NoDraft
from draftsmith.eval.metrics import metrics, ratio
from draftsmith.eval.sampling import Sampler
from draftsmith.eval.settings import EvalSettings
from draftsmith.eval.tree import Dynamic, Shape, chain_shape, optimal_shape
from draftsmith.files import publish_json, publish_text
from draftsmith.models.draft import DraftLM
from draftsmith.models.eagle import EagleHead
from draftsmith.models.target import Target

sys.path.insert(0, str(Path(__file__).parent))
from twin import heavy_twin

K, TOKENS, TREE = 5, 48, 32


class ForwardTimes:
    """Adds up the seconds spent inside model forwards: calls of these (owner, method) pairs, nested ones once."""

    def __init__(self, *methods: tuple[Any, str]) -> None:
        self.seconds = 0.0
        self._methods, self._inside = methods, False

    def __enter__(self) -> "ForwardTimes":
        for owner, name in self._methods:
            setattr(owner, name, self._timed(getattr(owner, name)))
        return self

    def __exit__(self, *_error: object) -> None:
        for owner, name in self._methods:
            delattr(owner, name)

    def _timed(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return inner(*args, **kwargs)
            self._inside, started = True, time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self._inside = False
                self.seconds += time.perf_counter() - started

        return timed


def forwards_of(drafter: Drafter) -> list[tuple[Any, str]]:
    """The methods of a drafter's model that run it."""
    if isinstance(drafter, LMDrafter):
        return [(drafter.model, "forward"), (drafter.model, "head")]
    assert isinstance(drafter, EagleDrafter)
    return [(drafter.head, name) for name in ("fuse", "step", "logits")]


class Study:
    """Rows of the study, printed as they come."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, what: str, interval: dict[str, float], goal: float | None = None, **settings: Any) -> None:
        row: dict[str, Any] = {"what": what, **interval, "settings": settings}
        if goal is not None:
            row |= {"goal": f">= {goal}", "met": interval["value"] >= goal}
        self.rows.append(row)
        bounds = f" [{interval['low']:.3f}, {interval['high']:.3f}]" if "low" in interval else ""
        print(
            f"{what}: {interval['value']:.3f}{bounds} {settings} {row.get('goal', '')} {row.get('met', '')}", flush=True
        )


def ours(target: Target, drafter: Drafter, text: list[int], shape: Shape) -> Decoded:
    return decode(
        target, drafter, [text], shape=shape, sampler=Sampler(0.0), max_new_tokens=TOKENS, eos_ids=frozenset()
    )[0]


def transformers_greedy(target: Target, text: list[int], assistant: Any = None) -> list[int]:
    options: dict[str, Any] = {"assistant_model": assistant} if assistant is not None else {}
    out = target.model.generate(
        torch.tensor([text]),
        attention_mask=torch.ones(1, len(text), dtype=torch.long),
        max_new_tokens=TOKENS,
        min_new_tokens=TOKENS,
        do_sample=False,
        pad_token_id=0,
        **options,
    )
    return out[0, len(text) :].tolist()


def paired(
    texts: list[list[int]], sides: dict[str, Callable[[list[int]], list[int]]], rounds: int = 2
) -> dict[str, np.ndarray]:
    """Seconds of each side per prompt (the best of `rounds`), the sides in turn. Raises if their tokens differ."""
    best = {name: np.full(len(texts), np.inf) for name in sides}
    for _ in range(rounds):
        for i, text in enumerate(texts):
            outputs = []
            for name, run in sides.items():
                started = time.perf_counter()
                outputs.append(run(text))
                best[name][i] = min(best[name][i], time.perf_counter() - started)
            if any(output != outputs[0] for output in outputs):
                raise RuntimeError(f"prompt {i}: {list(sides)} give different tokens")
    return best


def against_transformers(
    study: Study, name: str, target: Target, draft: DraftLM, texts: list[list[int]], goals: tuple[float, float]
) -> None:
    assistant = draft.model
    assistant.generation_config.num_assistant_tokens = K
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    assistant.generation_config.assistant_confidence_threshold = 0.0
    chain = chain_shape(K)
    seconds = paired(
        texts,
        {
            "plain": lambda text: ours(target, NoDraft(), text, chain).tokens,
            "generate": lambda text: transformers_greedy(target, text),
            "chain": lambda text: ours(target, LMDrafter(draft), text, chain).tokens,
            "assisted": lambda text: transformers_greedy(target, text, assistant),
        },
    )
    settings = {"target": name, "K": K, "prompts": len(texts), "tokens": TOKENS, "temperature": 0.0}
    study.add(
        "plain decoding, tokens/s, ours over generate",
        ratio(seconds["generate"], seconds["plain"]),
        goals[1],
        **settings,
    )
    study.add(
        "chain, tokens/s, ours over assisted generation",
        ratio(seconds["assisted"], seconds["chain"]),
        goals[0],
        **settings,
    )


def speed(
    study: Study, name: str, target: Target, drafters: dict[str, Drafter], texts: list[list[int]], goal: float | None
) -> None:
    """Measured speed-up over plain decoding, what the costs predict, and the time spent outside model forwards."""
    chain = chain_shape(K)
    verify_cost = cost_of_verify(target, texts[0])
    for draft, drafter in drafters.items():
        seconds = paired(
            texts,
            {
                "plain": lambda text: ours(target, NoDraft(), text, chain).tokens,
                "drafted": lambda text, d=drafter: ours(target, d, text, chain).tokens,
            },
        )
        measured = ratio(seconds["plain"], seconds["drafted"])
        settings = {"target": name, "draft": draft, "K": K, "domain": "code", "temperature": 0.0}
        study.add("speed-up over plain decoding", measured, goal, **settings)
        verify_time, draft_time = ForwardTimes((target, "forward")), ForwardTimes((drafter, "propose"))
        with verify_time, draft_time:
            results = [ours(target, drafter, text, chain) for text in texts]
        verifies = sum(len(result.trace) for result in results)
        tau = sum(len(result.tokens) for result in results) / verifies
        c = draft_time.seconds / verifies / K / (float(np.median(seconds["plain"])) / TOKENS)
        predicted = tau / (verify_cost[K + 1] / verify_cost[1] + K * c)
        about = {
            "draft_cost": round(c, 4),
            "tokens_per_verify": round(tau, 3),
            "predicted": round(predicted, 3),
            **settings,
        }
        study.add("speed-up, measured over predicted", {"value": measured["value"] / predicted}, 0.9, **about)
        inside = ForwardTimes((target, "forward"), *forwards_of(drafter))
        with inside:
            started = time.perf_counter()
            for text in texts:
                ours(target, drafter, text, chain)
            total = time.perf_counter() - started
        share = {"value": inside.seconds / total}
        study.add("share of time inside model forwards", share, 0.95 if goal else None, **settings)


def cost_of_verify(target: Target, text: list[int]) -> dict[int, float]:
    """Median seconds of one target forward over n tree nodes behind a prompt, sizes in turn."""
    sizes = (1, K + 1, 4, 8, 16, 32, 64)
    seconds: dict[int, list[float]] = {n: [] for n in sizes}
    with torch.inference_mode():
        cache = target.new_cache(1, len(text) + 80)
        target.forward(torch.tensor([text]), cache=cache, want_logits=False)
        cache.set_lengths(torch.tensor([len(text)]))
        for turn in range(12):
            for n in sizes:
                started = time.perf_counter()
                target.forward(torch.full((1, n), 7), cache=cache)
                if turn > 1:
                    seconds[n].append(time.perf_counter() - started)
    return {n: float(np.median(values)) for n, values in seconds.items()}


def trees(study: Study, target: Target, drafter: Drafter, texts: list[list[int]]) -> None:
    """Tokens per verify of a chain, the best static tree for the head's own profile, and EAGLE-2's dynamic tree."""
    depth = 6
    tuning = texts[: len(texts) // 4]  # shapes are chosen on these, and measured on the others
    profile = rank_profile(target, drafter, tuning, depth, 8)
    held = texts[len(texts) // 4 :]
    sharpest = max(
        (1.0, 0.7, 0.5, 0.35, 0.25),
        key=lambda t: tokens_per_verify(target, drafter, tuning, Dynamic(8, depth, TREE, t)),
    )
    shapes: dict[str, Shape] = {
        f"chain of {depth}": chain_shape(depth),
        f"static tree of {TREE}": optimal_shape(profile, TREE),
        f"dynamic tree of {TREE}": Dynamic(8, depth, TREE, sharpest),
    }
    print(
        f"chosen on {len(tuning)} other prompts: confidence_temperature {sharpest}, static tree {shapes[f'static tree of {TREE}']}"
    )
    found = {}
    for temperature in (0.0, 1.0):
        for name, shape in shapes.items():
            results = decode(
                target,
                drafter,
                held,
                shape=shape,
                sampler=Sampler(temperature),
                max_new_tokens=TOKENS,
                eos_ids=frozenset(),
                seed=0,
            )
            found[name, temperature] = results
            tau = metrics([result.trace for result in results], depth)["tokens_per_verify"]
            study.add(
                "tokens per verify",
                tau,
                draft="eagle3",
                tree=name,
                depth=depth,
                temperature=temperature,
                prompts=len(held),
            )
        base, static, dynamic = (found[name, temperature] for name in shapes)
        for what, a, b in (("dynamic tree over chain", dynamic, base), ("dynamic over static tree", dynamic, static)):
            verifies = [np.array([float(len(r.trace)) for r in side]) for side in (b, a)]
            study.add(f"tokens per verify, {what}", ratio(*verifies), 1.0, temperature=temperature, nodes=TREE)


def tokens_per_verify(target: Target, drafter: Drafter, texts: list[list[int]], shape: Shape) -> float:
    results = decode(
        target, drafter, texts, shape=shape, sampler=Sampler(0.0), max_new_tokens=TOKENS, eos_ids=frozenset()
    )
    return sum(len(r.tokens) for r in results) / sum(len(r.trace) for r in results)


class Along(Sampler):
    """Drafts the target's own greedy text, and notes at which rank the draft's logits had each of its tokens."""

    def follow(self, drafter: Drafter, prompt: list[int], truth: list[int], ranks: list[list[int]]) -> "Along":
        self.truth, self.ranks, self.vocabulary = truth, ranks, drafter.vocabulary
        propose = type(drafter).propose

        def at_start(committed: Any, shape: Shape, sampler: Sampler) -> Any:
            self.start, self.depth = len(committed.tokens[0]) - len(prompt), 0
            return propose(drafter, committed, shape, sampler)

        drafter.propose = at_start
        return self

    def draft(self, logits: torch.Tensor, count: int = 1) -> tuple[list[list[int]], None]:
        place = self.start + self.depth
        token = int(self.vocabulary.to_draft(torch.tensor(self.truth[place]))) if place < len(self.truth) else -1
        if token < 0:  # beyond the text, or a token that the draft cannot say: a miss, and the end of this chain
            if place < len(self.truth) and self.depth < len(self.ranks):
                self.ranks[self.depth].append(-1)
            self.depth = len(self.truth)
            return [[0]], None
        self.ranks[self.depth].append(int((logits[0] > logits[0, token]).sum()))
        self.depth += 1
        return [[token]], None


def rank_profile(target: Target, drafter: Drafter, texts: list[list[int]], depth: int, width: int) -> list[list[float]]:
    """profile[d][r]: how often, after d tokens of the target's own greedy text, its next one had rank r with the draft."""
    ranks: list[list[int]] = [[] for _ in range(depth)]
    for text in texts:
        truth = ours(target, NoDraft(), text, chain_shape(1)).tokens
        sampler = Along(0.0).follow(drafter, text, truth, ranks)
        decode(
            target,
            drafter,
            [text],
            shape=chain_shape(depth),
            sampler=sampler,
            max_new_tokens=TOKENS,
            eos_ids=frozenset(),
        )
        del drafter.propose
    return [[ranks[d].count(r) / max(len(ranks[d]), 1) for r in range(width)] for d in range(depth)]


PAGE = """# The decoder, measured

Made by `make bench-decode` from a finished demo; the numbers are in `docs/studies/decode.json`. All sides are timed in one process,
in turn on every prompt, the better of two rounds counts; a ratio's 95 % interval is bootstrapped over prompts.
The *heavy twin* computes the same function as the
demo's target at about twelve times its cost (blocks whose output projections are zero), so acceptance stays real while the
target's cost dominates, as it does for models that are served. `verify_cost` is the time of one target forward over n tree nodes,
in forwards over one token.

Machine: {machine}.

| what | setting | value | 95 % | goal | met |
|---|---|---|---|---|---|
{table}
"""


def page(rows: list[dict[str, Any]], environment: dict[str, Any]) -> str:
    """docs/decoding.md from the study's rows."""
    lines = []
    for row in rows:
        setting = ", ".join(f"{key} {value}" for key, value in row["settings"].items())
        interval = f"{row['low']:.2f} – {row['high']:.2f}" if "low" in row else ""
        met = {True: "yes", False: "**no**"}.get(row.get("met"), "")
        lines.append(f"| {row['what']} | {setting} | {row['value']:.2f} | {interval} | {row.get('goal', '')} | {met} |")
    hardware = environment.get("hardware", environment)
    machine = ", ".join(f"{key} {value}" for key, value in hardware.items() if not isinstance(value, dict | list))
    return PAGE.format(table="\n".join(lines), machine=machine)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, nargs="?", default=Path("runs/demo"))
    parser.add_argument("--prompts", type=int, default=8, help="for times; trees take eight times as many")
    arguments = parser.parse_args()
    run, study = arguments.run, Study()
    target = Target.load(run / "target")
    twin = heavy_twin(target)
    rows = Rows.open(run / "rows", "held_out")
    settings = EvalSettings(domains=("code",), prompts=8 * arguments.prompts, max_new_tokens=TOKENS)
    texts = held_out_prompts(rows, settings, target.context)["code"]
    draft = DraftLM.load(run / "draft" / "distilled", target)
    head = EagleHead.load(run / "eagle" / "eagle3", target)
    few = texts[: arguments.prompts]
    against_transformers(study, "demo target", target, draft, few, (1.3, 1.0))
    against_transformers(study, "heavy twin", twin, draft, few[:4], (1.05, 1.0))
    speed(study, "demo target", target, {"distilled": LMDrafter(draft), "eagle3": EagleDrafter(head)}, few, None)
    speed(study, "heavy twin", twin, {"distilled": LMDrafter(draft), "eagle3": EagleDrafter(head)}, few[:4], 1.8)
    for name, model in (("demo target", target), ("heavy twin", twin)):
        cost = cost_of_verify(model, texts[0])
        for n, seconds in sorted(cost.items()):
            study.add(
                "verify_cost", {"value": seconds / cost[1]}, target=name, nodes=n, milliseconds=round(1000 * seconds, 2)
            )
    trees(study, target, EagleDrafter(head), texts)
    environment = describe_environment()
    study_file = {"environment": environment, "command": "make bench-decode", "rows": study.rows}
    publish_json(Path("docs/studies/decode.json"), study_file)
    publish_text(Path("docs/decoding.md"), page(study.rows, environment))


if __name__ == "__main__":
    main()
