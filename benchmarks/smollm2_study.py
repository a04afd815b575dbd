"""`make study-smollm2`: our EAGLE-3 recipe against EAGLE-1 on a real target, the same tokens and the same dynamic tree.

Reads a run with a cache (configs/smollm2-135m.yaml), trains the heads of its config for every seed in worker processes of one
thread each, and decodes held-out prompts as the EAGLE study does. Writes docs/studies/smollm2.json and docs/smollm2.md; a
finished head is a line of `<folder>/runs.jsonl` and is not trained again.
"""

import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from draftsmith.config import load_config
from draftsmith.data.cache.reader import CacheReader
from draftsmith.train.settings import EagleTrainSettings

sys.path.insert(0, str(Path(__file__).parent))
from bootstrap import METHOD
from eagle import decoded, texts, trained_head
from eagle_heads import NEW_TOKENS
from smollm2_page import COMPARED, page, study_rows
from study import Entry, Journal, Plan, command, do_missing, opened, processes, publish_study, revisions, study_parser


@dataclass(frozen=True)
class Job:
    """One head: its name in the config, its settings as JSON, and the seed of its start, its order and its sampling."""

    head: str
    settings: str = field(repr=False)
    seed: int


def jobs(run: Path, tokens: int, seeds: int) -> list[Job]:
    """The two heads of the comparison with every seed; the config's other heads with the first."""
    heads = load_config(run / "resolved.yaml").config.eagle
    told = {name: settings.model_dump(mode="json") | {"tokens": tokens} for name, settings in heads.items()}
    both = [(name, seed) for seed in range(seeds) for name in COMPARED]
    others = [(name, 0) for name in told if name not in COMPARED]
    return [Job(name, json.dumps(told[name], sort_keys=True), seed) for name, seed in both + others]


def run_job(plan: Plan, job: Job) -> Entry:
    """Train and measure one head; what its line in runs.jsonl holds."""
    target, held_out = opened(plan.run)
    started = time.process_time()
    reader = CacheReader(plan.run / "cache", target.fingerprint())
    head, summary = trained_head(plan, asdict(job), reader, EagleTrainSettings(**json.loads(job.settings)))
    trained = time.process_time() - started
    return {
        "job": asdict(job),
        "parameters": sum(parameter.numel() for parameter in head.parameters()),
        "steps": summary.steps,
        "decoded": decoded(target, head, texts(held_out, False), plan, job.seed, tree=True),
        "seconds": [round(trained, 1), round(time.process_time() - started, 1)],
    }


def main() -> None:
    parser = study_parser(__doc__, "runs/study-smollm2", tokens=24_000, seeds=3, workers=2)
    parser.add_argument(
        "--page", action="store_true", help="train nothing: write the page from the heads that are done"
    )
    parser.set_defaults(run=Path("runs/smollm2-135m"))
    arguments = parser.parse_args()
    tokens = 600 if arguments.quick else arguments.tokens
    place = arguments.folder / (f"{tokens}-tokens" + "-quick" * arguments.quick)
    plan = Plan(arguments.run, place, 0, *((2, 8) if arguments.quick else (6, NEW_TOKENS)))
    plan.claim()
    todo = jobs(arguments.run, tokens, arguments.seeds)
    journal = Journal(plan.folder / "runs.jsonl", lambda entry: Job(**entry["job"]))
    if not arguments.page:
        do_missing(journal, {job: (plan, job) for job in todo}, run_job, processes(arguments.workers))
    if not (done := journal.of(todo)):
        parser.error(f"no head is done in {plan.folder}")
    made, about = command("study-smollm2", parser, arguments), {"intervals": METHOD, "revisions": revisions(done)}
    publish_study("smollm2", "smollm2", made, study_rows(done), page, plan.folder if arguments.quick else None, about)


if __name__ == "__main__":
    main()
