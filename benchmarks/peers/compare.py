"""`make bench-peers`: our default EAGLE-3 head against the recipes of speculators and SpecForge.

Reads a finished run (runs/demo). All recipes learn from the same rows in the same steps, from the same states, with the same
sizes of head and draft vocabulary; each peer trains with its own package in its own environment, at its default learning rate and
at others. Which one counts is chosen on other held-out rows than are decoded in the end. One decoder, ours, measures all heads.
Writes docs/studies/peers.json and docs/peers.md; what is done is a line of `<folder>/runs.jsonl` and is not done again.
"""

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from environments import PEERS, python_of
from imported import check, imported
from measure import CHAINS, SHAPES, measured, plain_texts, prompts_of
from peers_page import best_of, longer_rows, page, study_rows
from safetensors.torch import load_file
from states import held_out, recipe, write_states

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from bootstrap import METHOD
from study import Entry, Journal, command, do_missing, publish_study, revisions, study_parser

from draftsmith.files import digest
from draftsmith.models.eagle import EagleHead
from draftsmith.models.target import Target

HERE = Path(__file__).parent
#: Learning rates beside a peer's default, the likelier ones first.
RATES = {"speculators": (3e-3, 1e-2, 3e-2), "specforge": (3e-3, 1e-2, 1e-3)}
#: Our recipe with one thing changed: towards the peers', or where it may be improved.
ABLATIONS: dict[str, dict[str, Any]] = {
    "a start from the embedding": {"states_start": False},
    "a random start": {"states_start": False, "embedding_start": False},
    "a random start, of the output head too": {
        "states_start": False,
        "embedding_start": False,
        "head_from_target": False,
    },
    "without the feature loss": {"feature_loss": 0.0},
    "three rollouts": {"rollouts": 3},
    "the normed state fed back": {"norm_state": True},
    "adaptive KL and TV": {"loss": "adaptive_kl_tv"},
    "half the learning rate of matrices": {"matrix_lr": 0.005},
    "twice the learning rate of matrices": {"matrix_lr": 0.02},
}


@dataclass(frozen=True)
class Job:
    """One head: whose recipe, the learning rate (None: its default), the seed of order and start, what is changed in the recipe;
    of ours a digest of all its settings, which are the run's and change with it."""

    recipe: str
    rate: float | None = None
    seed: int = 0
    change: str = ""
    settings: str = ""


@dataclass(frozen=True)
class Plan:
    """What all jobs share. choosing, prompts: per domain, decoded to choose a learning rate and in the end."""

    run: Path
    folder: Path
    environments: Path
    tokens: int
    choosing: int
    prompts: int
    new_tokens: int

    @property
    def states(self) -> Path:
        return self.folder / "states"

    def ours(self, seed: int = 0, change: str = "") -> Job:
        settings = recipe(self.run, self.tokens).model_dump(mode="json") | (ABLATIONS[change] if change else {})
        return Job("ours", seed=seed, change=change, settings=digest(settings)[:12])

    def place(self, job: Job) -> Path:
        return self.folder / "heads" / f"{job.recipe}-{digest(asdict(job))[:12]}"


def train(plan: Plan, job: Job) -> Entry:
    """Train one head in a process of its own, of one thread; its line, with what its training.json says."""
    out = plan.place(job)
    shutil.rmtree(out, ignore_errors=True)
    if job.recipe == "ours":
        command = [sys.executable, str(HERE / "train_ours.py"), "--run", str(plan.run), "--tokens", str(plan.tokens)]
        for key, value in ABLATIONS[job.change].items() if job.change else ():
            command += ["--change", f"{key}={json.dumps(value)}"]
    else:
        python = python_of(job.recipe, plan.environments)
        command = [str(python), str(HERE / f"train_{job.recipe}.py"), "--states", str(plan.states)]
        command += [] if job.rate is None else ["--rate", str(job.rate)]
    command += ["--seed", str(job.seed), "--out", str(out)]
    log = plan.folder / "logs" / f"{out.name}.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    alone = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("w") as written:
        done = subprocess.run(command, env=os.environ | alone, stdout=written, stderr=subprocess.STDOUT)
    if done.returncode:
        raise RuntimeError(f"{job}: ended with {done.returncode}; its last words are in {log}")
    return {"job": asdict(job), "what": "trained"} | json.loads((out / "training.json").read_text(encoding="utf-8"))


def train_all(plan: Plan, journal: Journal, jobs: list[Job], workers: int) -> None:
    do_missing(journal, {(job, "trained"): (plan, job) for job in jobs}, train, ThreadPoolExecutor(workers))


class Decoder:
    """Opens heads and measures them: on the prompts that choose, and on those that count."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.target = Target.load(plan.run / "target")
        self.probes = load_file(plan.states / "states.safetensors")
        choosing, final = held_out(plan.run)
        self.prompts = {
            "choosing": prompts_of(choosing, self.target, plan.choosing, plan.new_tokens),
            "final": prompts_of(final, self.target, plan.prompts, plan.new_tokens),
        }
        self.plain = {name: plain_texts(self.target, found, plan.new_tokens) for name, found in self.prompts.items()}

    def head(self, job: Job) -> tuple[EagleHead, float]:
        """A trained head, and how far its logits are from those of the code that trained it."""
        folder = self.plan.place(job)
        if job.recipe == "ours":
            return EagleHead.load(folder, self.target), 0.0
        head = imported(folder, self.target)
        return head, check(head, folder, self.probes)

    def measure(self, journal: Journal, jobs: list[Job], name: str) -> None:
        for job in jobs:
            if (job, name) in journal.found:
                continue
            head, apart = self.head(job)
            what = CHAINS if name == "choosing" else tuple(SHAPES)
            found = measured(
                self.target, head, self.prompts[name], self.plain[name], what, self.plan.new_tokens, job.seed
            )
            journal.add({"job": asdict(job), "what": name, "decoded": found, "difference": apart})
            said = {setting: round(sum(t for t, _ in p) / sum(v for _, v in p), 3) for setting, p in found.items()}
            print(f"{name} {job}: {said}", flush=True)


def journal_of(plan: Plan) -> Journal:
    """What is done: trained, decoded to choose a learning rate, decoded in the end."""
    return Journal(plan.folder / "runs.jsonl", lambda entry: (Job(**entry["job"]), entry["what"]))


def run_all(plan: Plan, seeds: int, rates: int, ablations: bool, workers: int) -> list[Entry]:
    """Train and choose at the first seed, train the chosen at the others, and decode what is compared; the lines of these."""
    for peer in PEERS:
        python_of(peer, plan.environments)
    write_states(plan.run, plan.states, plan.tokens, list(range(seeds)))
    journal = journal_of(plan)
    ours = [plan.ours(seed) for seed in range(seeds)]
    tried = [Job(peer, rate) for peer in PEERS for rate in (*RATES[peer][:rates], None)]
    train_all(plan, journal, [ours[0], *tried], workers)
    decoder = Decoder(plan)
    decoder.measure(journal, [ours[0], *tried], "choosing")
    best = chosen_rates(journal.of((job, "choosing") for job in tried))
    print(f"chosen learning rates: {best}", flush=True)
    chosen = [Job(peer, best[peer], seed) for seed in range(seeds) for peer in PEERS]
    train_all(plan, journal, [*ours, *chosen], workers)
    counted = list(dict.fromkeys([*ours, *chosen, *(Job(peer) for peer in PEERS)]))
    decoder.measure(journal, counted, "final")
    changed = [plan.ours(change=change) for change in ABLATIONS] if ablations else []
    train_all(plan, journal, changed, workers)
    decoder.measure(journal, changed, "final")
    return lines_of(journal, [*counted, *tried, *changed])


def lines_of(journal: Journal, jobs: list[Job]) -> list[Entry]:
    """All that is known of these heads, and nothing of heads of other settings."""
    named = dict.fromkeys(jobs)
    return journal.of((job, what) for what in ("trained", "choosing", "final") for job in named)


def run_longer(plan: Plan, best: dict[str, float | None], workers: int) -> list[Entry]:
    """The chosen recipes once more, on as many tokens as this plan says, at one seed: whether what was found lasts."""
    write_states(plan.run, plan.states, plan.tokens, [0])
    journal = journal_of(plan)
    jobs = [plan.ours(), *(Job(peer, rate) for peer, rate in best.items())]
    train_all(plan, journal, jobs, workers)
    Decoder(plan).measure(journal, jobs, "final")
    return lines_of(journal, jobs)


def chosen_rates(entries: list[Entry]) -> dict[str, float | None]:
    return {peer: best_of(entries, peer)["job"]["rate"] for peer in PEERS}


def main() -> None:
    parser = study_parser(__doc__, "runs/bench-peers", tokens=24_000, seeds=3, workers=1)
    parser.add_argument("--environments", type=Path, default=Path(".peers"), help="where the peers are installed")
    parser.add_argument(
        "--rates", type=int, default=3, help="learning rates tried beside each peer's default, at most 3"
    )
    parser.add_argument("--ablations", action="store_true", help="also our recipe with one thing changed at a time")
    parser.add_argument("--longer", type=int, help="also the chosen recipes, at one seed, on so many tokens")
    given = parser.parse_args()
    torch.set_num_threads(1)
    tokens, sizes = (1500, (1, 2, 8)) if given.quick else (given.tokens, (8, 16, 48))
    folder = (given.folder / f"{tokens}-tokens").resolve()
    plan = Plan(given.run.resolve(), folder, given.environments.resolve(), tokens, *sizes)
    lines = run_all(plan, given.seeds, given.rates, given.ablations, given.workers)
    rows, about = study_rows(lines, tokens), {"intervals": METHOD, "revisions": revisions(lines)}
    if given.longer:
        longer = replace(plan, folder=folder.with_name(f"{given.longer}-tokens-longer"), tokens=given.longer)
        rows += longer_rows(run_longer(longer, chosen_rates(lines), given.workers), given.longer)
    publish_study(
        "peers", "peers", command("bench-peers", parser, given), rows, page, folder if given.quick else None, about
    )


if __name__ == "__main__":
    main()
