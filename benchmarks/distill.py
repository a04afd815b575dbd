"""`make study-distill`: which loss, draft size and teacher give the draft LM whose tokens the target accepts.

Reads a finished run (runs/demo: its target and rows), trains and measures one draft LM per combination in worker processes of one
thread each, and writes docs/studies/distill.json and docs/distillation.md. A finished combination is a line of
`<study folder>/runs.jsonl` and is not run again. `--quick` is a smoke test of a minute and writes no page.
"""

import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from draftsmith.data.cache.build import build_cache
from draftsmith.data.cache.manifest import CacheSettings
from draftsmith.data.cache.reader import CacheReader
from draftsmith.data.rows import Row, Rows
from draftsmith.eval.acceptance import PlainRuns, decode_all, decoding, evaluate, held_out_prompts
from draftsmith.eval.drafters import LMDrafter
from draftsmith.eval.settings import EvalSettings
from draftsmith.eval.timing import measured_speed
from draftsmith.files import digest
from draftsmith.models.draft import DraftLM
from draftsmith.models.target import Target
from draftsmith.train.distill import distill, new_draft
from draftsmith.train.settings import DistillSettings, LossName

sys.path.insert(0, str(Path(__file__).parent))
from bootstrap import METHOD
from distill_page import page, study_rows
from study import Journal, Plan, command, do_missing, opened, processes, publish_study, study_parser
from twin import heavy_twin

LOSSES = get_args(LossName)
COMPARED = ("forward_kl", "adaptive_kl_tv", "negative_log_acceptance")  # with every teacher
SIZES: dict[str, dict[str, Any]] = {"one block": {"blocks": (3,)}, "two blocks": {"blocks": (0, 3)}}
LARGER: dict[str, dict[str, Any]] = {"three blocks": {"blocks": (0, 1, 3)}}
#: The teacher of the default recipe, `CacheSettings()`; all losses are tried with the first of `TEACHERS`.
DEFAULT_TEACHER = "sampled 64"
TEACHERS: dict[str, dict[str, Any]] = {
    "top-k 64": {"k": 64, "distribution": "topk"},
    "top-k 16": {"k": 16, "distribution": "topk"},
    "sampled 64": {"k": 64, "distribution": "sampled"},
    "full": {"distribution": "from_last", "last": True, "state_codec": "fp32"},
}
UNTRAINED = "untrained"
TEMPERATURES = (0.0, 0.5, 1.0, 1.5, 2.0)
DOMAINS = ("code", "prose", "chat")


@dataclass(frozen=True)
class Job:
    """One draft LM: how it is trained, on how many tokens (0: not at all), and the seed of its order and its sampling."""

    loss: str
    size: str
    teacher: str
    seed: int
    tokens: int


def evaluation(plan: Plan, **others: Any) -> EvalSettings:
    """How drafts are decoded."""
    given = {"domains": DOMAINS, "temperatures": (0.0, 1.0), "K": 5, "prompts": plan.prompts}
    return EvalSettings(**given | {"max_new_tokens": plan.new_tokens} | others)


def jobs(tokens: int, seeds: int, limits: bool) -> list[Job]:
    """Every loss at both sizes with the default teacher, three losses with the other teachers, the starts; with `limits` the
    experiments on what limits the default recipe: a larger draft, and four times the tokens."""
    default = next(iter(TEACHERS))
    found = [Job(UNTRAINED, size, default, 0, 0) for size in (*SIZES, *(LARGER if limits else ()))]
    for seed in range(seeds):
        found += [Job(loss, size, default, seed, tokens) for size in SIZES for loss in LOSSES]
        found += [Job(loss, "two blocks", teacher, seed, tokens) for teacher in list(TEACHERS)[1:] for loss in COMPARED]
        if limits:
            pair = ("cross_entropy", str(DistillSettings().loss))
            found += [Job(loss, "three blocks", default, seed, tokens) for loss in pair]
            found += [Job(loss, "two blocks", default, seed, 4 * tokens) for loss in pair]
    return found


def quick_jobs() -> list[Job]:
    return [
        Job(UNTRAINED, "two blocks", "top-k 64", 0, 0),
        *(Job(loss, "two blocks", "top-k 64", 0, 1500) for loss in ("forward_kl", "total_variation")),
    ]


def cache_of(plan: Plan, teacher: str) -> Path:
    return plan.folder / "caches" / teacher.replace(" ", "-")


def make_caches(plan: Plan, teachers: set[str], tokens: int) -> None:
    """One small cache per teacher, of the same rows."""
    target, rows = opened(plan.run)[0], Rows.open(plan.run / "rows", "train")
    for teacher in sorted(teachers):
        settings = CacheSettings(taps="none", **TEACHERS[teacher])
        build_cache(target, rows, cache_of(plan, teacher), settings, train_tokens=tokens)


def run_job(plan: Plan, job: Job) -> dict[str, Any]:
    """Train and measure one draft; what its line in runs.jsonl holds."""
    target, held_out = opened(plan.run)
    started = time.monotonic()
    shape = (SIZES | LARGER)[job.size]
    if job.loss == UNTRAINED:
        draft = new_draft(target, DistillSettings(**shape), job.seed)
    else:
        settings = DistillSettings(
            loss=job.loss, tokens=job.tokens, batch_tokens=512, other_lr=0.0006, validations=1, held_out_rows=4, **shape
        )
        folder = plan.folder / "drafts" / digest(asdict(job))
        shutil.rmtree(folder, ignore_errors=True)
        reader = CacheReader(cache_of(plan, job.teacher), target.fingerprint())
        distill(target, reader, held_out, settings, folder, job.seed)
        draft = DraftLM.load(folder / "distilled", target)
        shutil.rmtree(folder)
    trained = time.monotonic() - started
    return {
        "job": asdict(job),
        "parameters": sum(parameter.numel() for parameter in draft.model.parameters()),
        "forced": forced(target, draft, held_out, plan.rows),
        "decoded": decoded(target, draft, held_out, plan, job.seed),
        "seconds": [round(trained, 1), round(time.monotonic() - started, 1)],
    }


@torch.no_grad()
def forced(target: Target, draft: DraftLM, rows: Rows, count: int) -> dict[str, dict[str, list[list[float]]]]:
    """Teacher-forced acceptance: per domain and kind [sum, positions] of each of the first `count` rows.

    "0": the draft's likeliest token is the target's. "1": Σ min(p, q) against the target's whole distribution. "1 sure" and
    "1 unsure": the same where the target's entropy is below, or not below, one nat.
    """
    found: dict[str, dict[str, list[list[float]]]] = {domain: {} for domain in DOMAINS}
    for domain in DOMAINS:
        for row in first_rows(rows, domain, count):
            ids = torch.from_numpy(np.asarray(row.token_ids, dtype=np.int64))[None]
            slots = torch.from_numpy(np.asarray(row.supervised, dtype=bool))[1:]
            p, q = (model.forward(ids).logits[0, :-1][slots].float().softmax(-1) for model in (target, draft))
            overlap = torch.minimum(p, q).sum(-1)
            sure = -(p * p.clamp(min=1e-30).log()).sum(-1) < 1.0
            same = (p.argmax(-1) == q.argmax(-1)).float()
            for kind, values in (("0", same), ("1", overlap), ("1 sure", overlap[sure]), ("1 unsure", overlap[~sure])):
                found[domain].setdefault(kind, []).append([float(values.sum()), len(values)])
    return found


def first_rows(rows: Rows, domain: str, count: int) -> Iterator[Row]:
    for row in rows:
        if row.domain == domain:
            if not count:
                return
            count -= 1
            yield row


def decoded(
    target: Target, draft: DraftLM, rows: Rows, plan: Plan, seed: int
) -> dict[str, dict[str, list[list[float]]]]:
    """Per domain and temperature, for each prompt: Σ overlaps, positions reached, tokens emitted, verifies."""
    settings = evaluation(plan, seed=seed)
    found: dict[str, dict[str, list[list[float]]]] = {}
    for domain, texts in held_out_prompts(rows, settings, target.context).items():
        for temperature in settings.temperatures:
            results = decode_all(target, LMDrafter(draft), texts, settings, decoding(settings, temperature))
            found.setdefault(domain, {})[f"{temperature:g}"] = [
                [
                    sum(sum(v.overlaps) for v in r.trace),
                    sum(len(v.overlaps) for v in r.trace),
                    sum(v.emitted for v in r.trace),
                    len(r.trace),
                ]
                for r in results
            ]
    return found


def failure_modes(plan: Plan, temperatures: tuple[float, ...]) -> list[dict[str, Any]]:
    """α, tokens per verify and speed of the run's own distilled draft at each temperature, drafting by sampling and greedily; on
    the heavy twin, whose cost is that of a target worth drafting for, on code alone."""
    target, held_out = opened(plan.run)
    drafter = LMDrafter(DraftLM.load(plan.run / "draft" / "distilled", target))
    twin, rows = heavy_twin(target), []
    for drafting in ("sampled", "greedy"):
        timed = min(3, plan.prompts)
        settings = evaluation(plan, drafting=drafting, temperatures=temperatures, timed_prompts=timed)
        prompts = held_out_prompts(held_out, settings, target.context)
        for entry in evaluate(target, drafter, prompts, settings, PlainRuns()):
            temperature, domain = entry["temperature"], entry["domain"]
            about = {"domain": domain, "temperature": temperature, "drafting": drafting, "K": settings.K}
            found = {
                "failure mode: alpha": entry["alpha"],
                "failure mode: tokens per verify": entry["tokens_per_verify"],
                "failure mode: speed-up, demo target": entry["speedup"],
            }
            if domain == DOMAINS[0]:
                few = prompts[domain][:timed]
                heavy = measured_speed(twin, drafter, few, settings, decoding(settings, temperature)).speedup()
                found["failure mode: speed-up, heavy twin"] = heavy
            rows += [{"what": what, **value, "settings": about} for what, value in found.items()]
            print(about, f"alpha {entry['alpha']['value']:.3f}, speed-up {entry['speedup']['value']:.2f}", flush=True)
    return rows


def main() -> None:
    parser = study_parser(__doc__, "runs/study-distill", tokens=25_000, seeds=3, workers=2)
    parser.add_argument("--limits", action="store_true", help="also a larger draft, and four times the tokens")
    arguments = parser.parse_args()
    quick = arguments.quick
    tokens = 1500 if quick else arguments.tokens
    todo = quick_jobs() if quick else jobs(tokens, arguments.seeds, arguments.limits)
    cached = tokens if quick else 4 * tokens  # as many as the longest of `--limits` sees, so that it can join later
    place = arguments.folder / (f"{tokens}-tokens-of-{cached}" + "-quick" * quick)
    plan = Plan(arguments.run, place, *((2, 2, 8) if quick else (8, 8, 32)))
    plan.claim()
    make_caches(plan, {job.teacher for job in todo}, cached)
    journal = Journal(plan.folder / "runs.jsonl", lambda entry: Job(**entry["job"]))
    do_missing(journal, {job: (plan, job) for job in todo}, run_job, processes(arguments.workers))
    trained, entries = time.monotonic(), journal.of(todo)
    rows = study_rows(entries, (str(DistillSettings().loss), DEFAULT_TEACHER), next(iter(TEACHERS)), tokens)
    rows += failure_modes(plan, (0.0, 1.0) if quick else TEMPERATURES)
    # A study that went on where it stopped took what its drafts took, shared between the workers.
    drafts = sum(entry["seconds"][1] for entry in entries) / arguments.workers
    minutes = (drafts + time.monotonic() - trained) / 60
    about = {"drafts": len(todo), "workers": arguments.workers}
    rows.append({"what": "minutes", "value": minutes, "settings": about, "goal": "<= 60", "met": minutes <= 60})
    made = command("study-distill", parser, arguments)
    publish_study("distill", "distillation", made, rows, page, plan.folder if quick else None, {"intervals": METHOD})


if __name__ == "__main__":
    main()
