"""`make study-eagle`: the EAGLE papers' claims, one by one, on the demo target.

Reads a finished run (runs/demo: its target and rows), trains and measures one head per row and seed in worker processes of one
thread each, and writes docs/studies/eagle.json and docs/eagle.md. A finished head is a line of `<study folder>/runs.jsonl`
and is not trained again, so an ended study goes on where it stopped; `--page` writes the page from the heads that are done.
`--quick` is a smoke test of a minute and writes no page.
"""

import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftsmith.data.batches import Batch
from draftsmith.data.cache.build import build_cache
from draftsmith.data.cache.manifest import CacheSettings
from draftsmith.data.cache.reader import CacheReader
from draftsmith.data.rows import Row, Rows
from draftsmith.eval.acceptance import held_out_prompts
from draftsmith.eval.decode import Decoded, Decoding, as_drafter, decode
from draftsmith.eval.sampling import Sampler
from draftsmith.eval.settings import EvalSettings
from draftsmith.eval.tree import Dynamic, Shape, chain_shape
from draftsmith.files import digest
from draftsmith.models.eagle import EagleHead
from draftsmith.models.medusa import MedusaHeads
from draftsmith.models.target import Target, choose_taps
from draftsmith.train.eagle import EagleSummary, new_objective, train_eagle
from draftsmith.train.held_out import HeldOut
from draftsmith.train.objectives import Objective
from draftsmith.train.settings import EagleTrainSettings

sys.path.insert(0, str(Path(__file__).parent))
from bootstrap import METHOD
from eagle_claims import study_rows
from eagle_heads import FIRST, NEW_TOKENS, ROWS, SHARED, TEACHERS, TUNED, TUNING_SEED, WITH_TREE, K
from eagle_page import page
from study import Journal, Plan, command, do_missing, opened, processes, publish_study, revisions, study_parser

DOMAINS = ("code", "prose", "chat")
TREE = Dynamic(8, 6, 32)


@dataclass(frozen=True)
class Job:
    """One head: the row it is of, its settings as JSON, and the seed of its start, its order and its sampling."""

    row: str
    settings: str = field(repr=False)
    seed: int


def job(row: str, tokens: int, seed: int) -> Job:
    settings = SHARED | (ROWS | TUNED)[row] | {"tokens": tokens}
    return Job(row, json.dumps(settings, sort_keys=True), seed)


def jobs(tokens: int, seeds: int) -> list[Job]:
    """The claim's rows with all their seeds, then every other row seed by seed, then those that chose the learning rates."""
    first = [job(row, tokens, seed) for seed in range(seeds) for row in FIRST]
    others = [[job(row, tokens, seed) for row in ROWS if row not in FIRST] for seed in range(seeds)]
    tuned = [job(row, tokens, TUNING_SEED) for row in TUNED]
    return [*first, *(one for entries in others for one in entries), *tuned]


def quick_jobs() -> list[Job]:
    return [job(row, 1500, 0) for row in (*FIRST, "eagle3, one tap", "full teacher, TV", "medusa")]


def cache_of(plan: Plan, teacher: str) -> Path:
    return plan.folder / "caches" / teacher


def tap_sets(target: Target) -> dict[str, tuple[int, ...]]:
    """The taps that EAGLE-3 fuses by default, the last block's alone, and three of which one is the last block's."""
    last = target.blocks - 1
    return {"auto": choose_taps(target.blocks), "last": (last,), "with last": (0, last // 2 + 1, last)}


def make_caches(plan: Plan, teachers: set[str], tokens: int | None) -> None:
    """A cache per teacher, of the same rows, with every tap that any head reads and the last states."""
    target, rows = opened(plan.run)[0], Rows.open(plan.run / "rows", "train")
    taps = tuple(sorted({tap for chosen in tap_sets(target).values() for tap in chosen}))
    for teacher in sorted(teachers):
        settings = CacheSettings(taps=taps, last=True, **TEACHERS[teacher])
        build_cache(target, rows, cache_of(plan, teacher), settings, train_tokens=tokens)


def trainer_settings(target: Target, settings: dict[str, Any]) -> EagleTrainSettings:
    given = {name: value for name, value in settings.items() if name != "teacher"}
    if given["kind"] == "eagle3":
        given["taps"] = tap_sets(target)[given.get("taps", "auto")]
    return EagleTrainSettings(**given)


def trained_head(
    plan: Plan, job: dict[str, Any], reader: CacheReader, settings: EagleTrainSettings
) -> tuple[EagleHead | MedusaHeads, EagleSummary]:
    """A head that is trained anew and of which no file stays, and what its training came to. job: its name, seed and settings."""
    target, held_out = opened(plan.run)
    folder = plan.folder / "heads" / digest(job)
    shutil.rmtree(folder, ignore_errors=True)
    summary = train_eagle(target, reader, held_out, settings, folder, job["seed"])
    head: EagleHead | MedusaHeads = (MedusaHeads if settings.kind == "medusa" else EagleHead).load(folder, target)
    shutil.rmtree(folder)
    return head, summary


def run_job(plan: Plan, job: Job) -> dict[str, Any]:
    """Train and measure one head; what its line in runs.jsonl holds."""
    target, held_out = opened(plan.run)
    started = time.process_time()
    raw = json.loads(job.settings)
    settings = trainer_settings(target, raw)
    reader = CacheReader(cache_of(plan, raw.get("teacher", "sampled")), target.fingerprint())
    head, _ = trained_head(plan, asdict(job), reader, settings)
    trained = time.process_time() - started
    tuning = job.seed == TUNING_SEED
    objective = new_objective(head, target, reader.taps, settings.model_copy(update={"rollouts": K}))
    return {
        "job": asdict(job),
        "parameters": sum(parameter.numel() for parameter in head.parameters()),
        "forced": {domain: forced(objective, measured(plan.run, domain, plan.rows, tuning)) for domain in DOMAINS},
        "decoded": decoded(target, head, texts(held_out, tuning), plan, job.seed, tuning or job.row in WITH_TREE),
        "seconds": [round(trained, 1), round(time.process_time() - started, 1)],
    }


def texts(rows: Rows, tuning: bool) -> dict[str, list[Row]]:
    """Held-out rows of each domain: every second one for tuning, the others for what is reported."""
    found: dict[str, list[Row]] = {domain: [] for domain in DOMAINS}
    turn = dict.fromkeys(DOMAINS, 0)
    for row in rows:
        if row.domain in found:
            turn[row.domain] += 1
            if (turn[row.domain] % 2 == 0) == tuning:
                found[row.domain].append(row)
    return found


@cache
def measured(run: Path, domain: str, count: int, tuning: bool) -> list[tuple[Batch, Tensor]]:
    """The first `count` rows of a domain with the target's states and distributions [T, V], computed once in each process."""
    target, held_out = opened(run)
    rows = texts(held_out, tuning)[domain][:count]
    taps = tuple(sorted({tap for chosen in tap_sets(target).values() for tap in chosen}))
    batches = HeldOut.of(target, rows, taps).batches
    found = []
    for batch in batches:
        assert batch.last is not None
        with torch.no_grad():
            found.append((batch, target.head(batch.last[0]).float().softmax(-1)))
    return found


@torch.no_grad()
def forced(objective: Objective, rows: Sequence[tuple[Batch, Tensor]]) -> dict[str, list[list[float]]]:
    """Teacher-forced acceptance: for each row [Σ of step 0, …, Σ of step K − 1, predictions of step 0, …].

    Step k joins the text's own tokens and the head's own states: what it predicts when its k drafted tokens were right. "0": its
    likeliest token is the target's; "1": Σ min(p, q) against the target's whole distribution; "ceiling": the target's mass on
    what the head can say.
    """
    objective.eval()
    ids = objective.vocabulary.target_ids
    found: dict[str, list[list[float]]] = {"0": [], "1": [], "ceiling": []}
    for batch, distribution in rows:
        sums: dict[str, list[float]] = {kind: [] for kind in found}
        counts = []
        for k, (slots, logits) in enumerate(objective.predictions(batch)):
            p = distribution[objective.teacher_places(slots, k)[1]]
            said = p if objective.vocabulary.full else p[:, ids]
            sums["0"].append(float((ids[logits.argmax(-1)] == p.argmax(-1)).sum()))
            sums["1"].append(float(torch.minimum(said, logits.softmax(-1)).sum()))
            sums["ceiling"].append(float(said.sum()))
            counts.append(float(len(p)))
        for kind, values in sums.items():
            found[kind].append([*values, *counts])
    return found


def decoded(
    target: Target, head: EagleHead | MedusaHeads, rows: dict[str, list[Row]], plan: Plan, seed: int, tree: bool
) -> dict[str, dict[str, list[list[float]]]]:
    """Per domain and "shape temperature", for each prompt: tokens emitted, verifies, Σ overlaps, positions reached; for chains
    also at each position how often it was accepted [K] and reached [K]. All prompts are decoded in one batch."""
    settings = EvalSettings(domains=DOMAINS, K=K, prompts=plan.prompts, max_new_tokens=plan.new_tokens)
    prompts = held_out_prompts([row for domain in DOMAINS for row in rows[domain]], settings, target.context)
    of_prompt = [domain for domain, texts in prompts.items() for _ in texts]
    drafter, found = as_drafter(head, target), {domain: {} for domain in prompts}  # type: dict[str, dict[str, Any]]
    shapes: dict[str, Shape] = {"chain": chain_shape(K)}
    if tree:
        shapes["tree"] = TREE if isinstance(head, EagleHead) else replace(TREE, depth=K)  # as deep as there are heads
    for name, shape in shapes.items():
        for temperature in (0.0, 1.0):
            results = decode(
                target,
                drafter,
                [prompt for texts in prompts.values() for prompt in texts],
                Decoding(shape=shape, sampler=Sampler(temperature), max_new_tokens=plan.new_tokens, seed=seed),
            )
            for domain, result in zip(of_prompt, results, strict=True):
                sums = list(prompt_sums(result, name == "chain"))
                found[domain].setdefault(f"{name} {temperature:g}", []).append(sums)
    return found


def prompt_sums(result: Decoded, by_position: bool) -> Iterator[float]:
    trace = result.trace
    yield from (sum(v.emitted for v in trace), len(trace))
    yield from (sum(sum(v.overlaps) for v in trace), sum(len(v.overlaps) for v in trace))
    if by_position:
        yield from (sum(k < len(v.hits) and v.hits[k] for v in trace) for k in range(K))
        yield from (sum(k < len(v.hits) for v in trace) for k in range(K))


def main() -> None:
    parser = study_parser(__doc__, "runs/study-eagle", tokens=20_000, seeds=3, workers=2)
    parser.add_argument(
        "--page", action="store_true", help="train nothing: write the page from the heads that are done"
    )
    arguments = parser.parse_args()
    tokens = 1500 if arguments.quick else arguments.tokens
    todo = quick_jobs() if arguments.quick else jobs(tokens, arguments.seeds)
    place = arguments.folder / (f"{tokens}-tokens" + "-quick" * arguments.quick)
    plan = Plan(arguments.run, place, *((2, 2, 8) if arguments.quick else (8, 8, NEW_TOKENS)))
    plan.claim()
    journal = Journal(plan.folder / "runs.jsonl", lambda entry: Job(**entry["job"]))
    if not arguments.page:
        make_caches(plan, set(TEACHERS), tokens if arguments.quick else None)
        do_missing(journal, {job: (plan, job) for job in todo}, run_job, processes(arguments.workers))
    if not (done := journal.of(todo)):
        parser.error(f"no head is done in {plan.folder}")
    rows = study_rows(done, arguments.workers)
    made, about = command("study-eagle", parser, arguments), {"intervals": METHOD, "revisions": revisions(done)}
    publish_study("eagle", "eagle", made, rows, page, plan.folder if arguments.quick else None, about)


if __name__ == "__main__":
    main()
