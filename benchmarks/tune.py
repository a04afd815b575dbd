"""`make bench-tune`: what the tuner predicts against what decoding then measures, on the demo's target and its heavy twin.

Runs `draftsmith.eval.tune` on both as `draftsmith tune` does, at temperature 0, and on the target at temperature 1 as well. Reads a
finished run (runs/demo); writes docs/studies/tune.json and docs/tuning.md. Times mean something on a quiet machine alone.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from draftsmith.data.rows import Rows
from draftsmith.environment import describe_environment
from draftsmith.eval.acceptance import held_out_prompts
from draftsmith.eval.drafters import Drafter, EagleDrafter, LMDrafter, PromptLookup
from draftsmith.eval.settings import EvalSettings
from draftsmith.eval.skill import verdict
from draftsmith.eval.tune import Tuner
from draftsmith.eval.tune_settings import TuneSettings
from draftsmith.files import publish_json, publish_text
from draftsmith.models.draft import DraftLM
from draftsmith.models.eagle import EagleHead
from draftsmith.models.target import Target

sys.path.insert(0, str(Path(__file__).parent))
from tune_page import page
from twin import heavy_twin

TOKENS_GOAL, SPEED_GOAL = 0.03, 0.10  # how far a prediction may be from what is then measured
FULL: dict[str, Any] = {"prompts": 4, "temperatures": (0.0, 0.5, 1.0, 1.5), "batches": (1, 4)}
HOT: dict[str, Any] = {
    "prompts": 12,
    "temperature": 1.0,
    "temperatures": (1.0,),
    "batches": (1,),
    "timed_prompts": 9,
    "widths": (),
}
QUICK: dict[str, Any] = {
    "prompts": 1,
    "K": 3,
    "depth": 2,
    "budgets": (7,),
    "widths": (3,),
    "repetitions": 1,
    "timed_prompts": 2,
    "batches": (1, 2),
}


def tuned(
    name: str, target: Target, drafters: dict[str, Drafter], run: Path, settings: TuneSettings, tokens: int
) -> dict[str, Any]:
    """The tuner's document for one target."""
    evaluation = EvalSettings(max_new_tokens=tokens)
    prompts = held_out_prompts(Rows.open(run / "rows", "held_out"), evaluation, target.context)
    started = time.monotonic()
    document = Tuner(target, drafters, prompts, settings, evaluation, lambda line: print(line, flush=True)).run()
    document["target"] = {"path": name}
    print(f"{name}: {verdict(document)} ({time.monotonic() - started:.0f} s)", flush=True)
    return document


def rows_of(name: str, document: dict[str, Any]) -> list[dict[str, Any]]:
    """Study rows: each setting that was decoded for real, and what was found about limits."""
    rows = []
    for place, entry in enumerate(document["verified"], 1):
        about = {
            "target": name,
            "temperature": document["temperature"],
            "rank": place,
            **{key: entry[key] for key in ("draft", "tree", "drafting", "prompts")},
        }
        rows += [
            {"what": "tokens per verify", **entry["measured_tokens_per_verify"], "settings": about},
            _error("tokens per verify, predicted less decoded", entry["tokens_per_verify_error"], TOKENS_GOAL, about),
            {"what": "speed-up over plain decoding", **entry["speedup"], "settings": about},
            _error("speed-up, predicted less measured", entry["speedup_error"], SPEED_GOAL, about),
        ]
    for entry in document["temperatures"]:
        about = {"target": name, "temperature": entry["temperature"], "draft": entry["draft"]}
        for drafting, best in (("sampled or greedy", entry), ("greedy", entry["greedy"])):
            settings = about | {"drafting": drafting, "tree": best["tree"]}
            rows.append(
                {"what": "speed-up, predicted, by temperature", **best["speedup_predicted"], "settings": settings}
            )
    for entry in document["batches"]:
        settings = {"target": name, "temperature": document["temperature"], "batch": entry["batch"]}
        settings |= {key: entry["best"][key] for key in ("draft", "tree")}
        rows.append(
            {"what": "speed-up, predicted, by batch", **entry["best"]["speedup_predicted"], "settings": settings}
        )
    return rows


def _error(what: str, value: float, goal: float, settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "what": what,
        "value": value,
        "settings": settings,
        "goal": f"within {goal:.0%}",
        "met": abs(value) <= goal,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, nargs="?", default=Path("runs/demo"))
    parser.add_argument(
        "--quick", action="store_true", help="a small setting that proves the way; its numbers mean nothing"
    )
    parser.add_argument(
        "--out", type=Path, help="folder of the page and studies/tune.json; docs, or runs/bench-tune if quick"
    )
    arguments = parser.parse_args()
    run: Path = arguments.run
    out: Path = arguments.out or Path("runs/bench-tune" if arguments.quick else "docs")
    target = Target.load(str(run / "target"))
    drafters: dict[str, Drafter] = {
        "distilled": LMDrafter(DraftLM.load(run / "draft" / "distilled", target)),
        "eagle3": EagleDrafter(EagleHead.load(run / "eagle" / "eagle3", target)),
        "prompt-lookup": PromptLookup(),
    }
    cold, hot = (TuneSettings(**(settings | QUICK if arguments.quick else settings)) for settings in (FULL, HOT))
    tokens = 12 if arguments.quick else 48
    plans = (
        ("demo target", target, cold),
        ("demo target", target, hot),
        ("heavy twin", heavy_twin(target), cold),
    )
    rows: list[dict[str, Any]] = []
    documents = []
    for name, model, settings in plans:
        documents.append(tuned(name, model, drafters, run, settings, tokens))
        rows += rows_of(name, documents[-1])
    environment = describe_environment()
    study = {"environment": environment, "command": "make bench-tune", "rows": rows}
    publish_json(out / "studies" / "tune.json", study)
    publish_text(out / "tuning.md", page(rows, [verdict(d) for d in documents], environment))


if __name__ == "__main__":
    main()
