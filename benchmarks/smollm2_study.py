"""`make study-smollm2`: EAGLE-3 with rollouts against EAGLE-1 on a real target, the same tokens and the same dynamic tree.

Reads a run with a cache (configs/smollm2-135m.yaml), trains the config's heads `eagle1` and `eagle3` for every seed in worker
processes of one thread each, and decodes held-out prompts with the config's tree and with chains. Writes docs/studies/smollm2.json
and docs/smollm2.md; a finished head is a line of `<folder>/runs.jsonl` and is not trained again.
"""

import shutil
import sys
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from draftsmith.config import load_config
from draftsmith.data.cache.reader import CacheReader
from draftsmith.eval.acceptance import held_out_prompts
from draftsmith.eval.decode import Decoding, decode
from draftsmith.eval.drafters import Drafter, EagleDrafter, NoDraft
from draftsmith.eval.sampling import Sampler
from draftsmith.eval.settings import EvalSettings
from draftsmith.eval.tree import Dynamic, Shape, chain_shape
from draftsmith.files import digest
from draftsmith.models.eagle import EagleHead
from draftsmith.train.eagle import train_eagle
from draftsmith.train.settings import EagleTrainSettings

sys.path.insert(0, str(Path(__file__).parent))
from smollm2_page import HEADS, page, study_rows
from study import Entry, Journal, Plan, command, do_missing, opened, processes, publish_study, study_parser

DOMAINS = ("code", "prose", "chat")
K = 5
SHAPES: dict[str, Shape] = {"tree": Dynamic(8, 6, 32), "chain": chain_shape(K)}
Prompts = dict[str, list[list[int]]]


@dataclass(frozen=True)
class Job:
    """One head: which of the config's, on how many tokens, and the seed of its start, its order and its sampling."""

    head: str
    tokens: int
    seed: int


def settings_of(run: Path, job: Job) -> EagleTrainSettings:
    settings = load_config(run / "resolved.yaml").config.eagle[job.head]
    return settings.model_copy(update={"tokens": job.tokens})


@cache
def prompts_of(plan: Plan) -> Prompts:
    target, held_out = opened(plan.run)
    settings = EvalSettings(domains=DOMAINS, K=K, prompts=plan.prompts, max_new_tokens=plan.new_tokens)
    return held_out_prompts(list(held_out), settings, target.context)


def decoded(plan: Plan, drafter: Drafter, shape: Shape, temperature: float, seed: int) -> dict[str, list[Any]]:
    """Of every domain the decoded prompts, a domain at a time."""
    target, _ = opened(plan.run)
    options = Decoding(shape=shape, sampler=Sampler(temperature), max_new_tokens=plan.new_tokens, seed=seed)
    return {domain: decode(target, drafter, prompts, options) for domain, prompts in prompts_of(plan).items()}


@cache
def plain_texts(plan: Plan) -> dict[str, list[list[int]]]:
    """Plain greedy decoding: what every head must reproduce at T = 0."""
    found = decoded(plan, NoDraft(), chain_shape(1), 0.0, 0)
    return {domain: [result.tokens for result in results] for domain, results in found.items()}


def run_job(plan: Plan, job: Job) -> Entry:
    """Train and measure one head; what its line in runs.jsonl holds."""
    target, held_out = opened(plan.run)
    started = time.process_time()
    reader = CacheReader(plan.run / "cache", target.fingerprint())
    folder = plan.folder / "heads" / digest(asdict(job))
    shutil.rmtree(folder, ignore_errors=True)
    summary = train_eagle(target, reader, held_out, settings_of(plan.run, job), folder, job.seed)
    head = EagleHead.load(folder, target)
    trained = time.process_time() - started
    found: dict[str, dict[str, list[list[int]]]] = {}
    equal: dict[str, list[int]] = {}
    for name, shape in SHAPES.items():
        for temperature in (0.0, 1.0):
            results = decoded(plan, EagleDrafter(head), shape, temperature, job.seed)
            for domain, texts in results.items():
                sums = [[sum(step.emitted for step in text.trace), len(text.trace)] for text in texts]
                found.setdefault(domain, {})[f"{name} {temperature:g}"] = sums
            if temperature == 0.0:
                same = [
                    text.tokens == plain
                    for domain, texts in results.items()
                    for text, plain in zip(texts, plain_texts(plan)[domain], strict=True)
                ]
                equal[name] = [sum(same), len(same)]
    shutil.rmtree(folder)
    return {
        "job": asdict(job),
        "parameters": sum(parameter.numel() for parameter in head.parameters()),
        "steps": summary.steps,
        "decoded": found,
        "equal": equal,
        "seconds": [round(trained, 1), round(time.process_time() - started, 1)],
    }


def main() -> None:
    parser = study_parser(__doc__, "runs/study-smollm2", tokens=16_000, seeds=3, workers=2)
    parser.set_defaults(run=Path("runs/smollm2-135m"))
    arguments = parser.parse_args()
    tokens = 600 if arguments.quick else arguments.tokens
    plan = Plan(arguments.run, arguments.folder / f"{tokens}-tokens", 0, *((2, 8) if arguments.quick else (8, 32)))
    todo = [Job(head, tokens, seed) for seed in range(arguments.seeds) for head in HEADS]
    journal = Journal(plan.folder / "runs.jsonl", lambda entry: Job(**entry["job"]))
    do_missing(journal, {job: (plan, job) for job in todo}, run_job, processes(arguments.workers))
    about = {head: settings_of(arguments.run, Job(head, tokens, 0)).model_dump(mode="json") for head in HEADS}
    rows = study_rows(journal.of(todo), about)
    made = command("study-smollm2", parser, arguments)
    publish_study("smollm2", "smollm2", made, rows, page, plan.folder if arguments.quick else None)


if __name__ == "__main__":
    main()
