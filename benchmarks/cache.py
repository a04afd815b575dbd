"""`make bench-cache`: what each cache codec costs in bytes and time, and what a draft trained on it loses.

Drafts of every codec are trained on the same rows with the same seeds and decoded on the same prompts, so that a codec is
compared with the exact cache pair by pair. Reads a run's target and rows (and makes them where they are missing), keeps
every result in a file of its own folder, and goes on from there when it is started again. Writes docs/studies/cache.json
and docs/cache.md.
"""

import argparse
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import save_file

from draftsmith.config import embedded, load_config
from draftsmith.data.cache.build import build_cache
from draftsmith.data.cache.codecs import DISTRIBUTION_CODECS, STATE_CODECS, kept_kl
from draftsmith.data.cache.fields import bytes_per_token, cache_fields, row_uniforms
from draftsmith.data.cache.manifest import CacheSettings
from draftsmith.data.cache.reader import CacheReader
from draftsmith.data.rows import Rows
from draftsmith.eval.acceptance import decode_all, decoding, held_out_prompts
from draftsmith.eval.drafters import Drafter, EagleDrafter, LMDrafter
from draftsmith.eval.settings import EvalSettings
from draftsmith.models.draft import DraftLM
from draftsmith.models.eagle import EagleHead
from draftsmith.models.target import Target
from draftsmith.run import RunFolder, execute, needed
from draftsmith.stages import stage_units
from draftsmith.train.distill import distill
from draftsmith.train.eagle import train_eagle
from draftsmith.work import Work

sys.path.insert(0, str(Path(__file__).parent))
from cache_page import Study, page
from study import Entry, Journal, command, do_missing, opened, processes, publish_study

TEMPERATURES = (0.0, 1.0)
DRAFTS = ("eagle", "draft-lm")


class Variant(NamedTuple):
    """One way to keep a cache."""

    state: str
    distribution: str
    k: int

    @property
    def name(self) -> str:
        return f"{self.state}, {self.distribution}" + (f" {self.k}" if self.distribution != "from_last" else "")

    @property
    def settings(self) -> CacheSettings:
        return CacheSettings.model_validate(
            {"state_codec": self.state, "distribution": self.distribution, "k": max(self.k, 1)}
        )

    def trains(self, draft: str) -> "Variant":
        """The variant whose draft is this one's too: a draft LM reads no states, only what the distribution is made of."""
        if draft == "eagle" or self.distribution == "from_last":
            return self
        return Variant("bf16", self.distribution, self.k)


EXACT = Variant("fp32", "from_last", 0)
STATES = [Variant(codec, "topk", 64) for codec in ("bf16", "fp8", "int8", "int4")]
DISTRIBUTIONS = [Variant("bf16", *kept) for kept in (("topk", 16), ("sampled", 32), ("from_last", 0))]
# A quarter of what others store leaves room for so much of the distribution: at width 256, and at width 1024.
SMALL = {
    "demo": [Variant("int4", "topk8", 32), Variant("int4", "sampled", 22)],
    "wide": [Variant("int4", "sampled", 96)],
}
VARIANTS = [EXACT, *STATES, *DISTRIBUTIONS, *SMALL["demo"], *SMALL["wide"]]


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    tokens: int  # cached, and seen once in training
    prompts: int  # per domain and temperature
    new_tokens: int
    seeds: int
    held_out_rows: int
    timed_tokens: int  # of bytes, MB/s and KL
    variants: tuple[Variant, ...]


FULL = Size(12_000, 8, 32, 3, 24, 2048, tuple(VARIANTS))
QUICK = Size(800, 2, 12, 1, 4, 256, (EXACT, Variant("bf16", "topk", 64), *SMALL["demo"][:1]))


def ensure_run(run: Path) -> None:
    """The stages `target` and `prepare` of the demo's config, into `run`, unless their products are there."""
    if (run / "target" / "config.json").is_file() and (run / "rows" / "held_out").is_dir():
        return
    loaded = load_config(embedded("demo"), [f"name={run.name}", f"run_root={run.parent}", "tracking.trackers=[]"])
    work, folder = Work(loaded.config, print), RunFolder(run)
    folder.describe(loaded)
    execute(needed(stage_units(loaded.config, work), "prepare"), folder, print)


def wide_target(like: Target, width: int = 1024) -> Target:
    """Random weights at a width nearer to what is served, with the tokenizer of `like`. Its states have no outliers."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=like.vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        initializer_range=0.06,
    )
    return Target(AutoModelForCausalLM.from_config(config, dtype=torch.float32), like.tokenizer, "wide")


@torch.inference_mode()
def live(target: Target, rows: Rows, tokens: int) -> dict[str, torch.Tensor]:
    """taps [N, A, W], last [N, W], logits [N, V] and uniforms [N] of the first rows, `tokens` or a few more."""
    taps = tuple(cache_fields(CacheSettings(), target.width, target.vocabulary, target.blocks)["taps"]["blocks"])
    found: dict[str, list[torch.Tensor]] = {"taps": [], "last": [], "logits": [], "uniforms": []}
    total = 0
    for row in rows:
        out = target.forward(torch.from_numpy(row.token_ids).long()[None], taps)
        assert out.taps is not None
        assert out.logits is not None
        parts = (out.taps[0], out.last[0], out.logits[0].float(), row_uniforms(row.token_ids))
        for name, values in zip(found, parts, strict=True):
            found[name].append(values)
        if (total := total + len(row.token_ids)) >= tokens:
            break
    return {name: torch.cat(values) for name, values in found.items()}


def best_seconds(work: Callable[[], object], turns: int = 3) -> float:
    seconds = []
    for _ in range(turns):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


@torch.inference_mode()
def measure_bytes(
    target: Target, rows: Rows, states: dict[str, torch.Tensor], variant: Variant, size: Size, place: Path
):
    """Bytes per token, MB/s and tokens/s of encoding to a file and of reading rows back, KL of logits rebuilt from `last`."""
    fields = cache_fields(variant.settings, target.width, target.vocabulary, target.blocks)
    codec, teacher = STATE_CODECS[variant.state], DISTRIBUTION_CODECS[variant.distribution]
    place.mkdir(parents=True, exist_ok=True)

    def write() -> None:
        tensors = codec.encode(states["taps"], codec.rotation)
        if "last" in fields:
            last = codec.encode(states["last"][:, None], codec.rotation)
            tensors |= {f"last.{part}": values for part, values in last.items()}
        if teacher.parts:
            tensors |= teacher.encode(states["logits"], variant.k, states["uniforms"])
        save_file(
            {f"field.{name}": values.contiguous() for name, values in tensors.items()}, place / "timed.safetensors"
        )

    writing = best_seconds(write)
    info = build_cache(target, rows, place / "cache", variant.settings, size.timed_tokens)
    reader = CacheReader(place / "cache")
    order = np.random.default_rng(0).permutation(len(reader))
    reading = best_seconds(lambda: [reader.batch([int(index)]) for index in order])
    rebuilt = target.head(codec.roundtrip(states["last"][:, None])[:, 0]).float().log_softmax(-1)
    kl = kept_kl(states["logits"].log_softmax(-1), rebuilt)
    per_token, tokens = bytes_per_token(fields), len(states["last"])
    shutil.rmtree(place)
    return {
        "bytes_per_token": per_token,
        "on_disk": info["bytes_per_token"],
        "kept_mass": info["kept_mass"],
        "write_tokens_per_second": tokens / writing,
        "write_mb_per_second": tokens * per_token / writing / 1e6,
        "read_tokens_per_second": info["tokens"] / reading,
        "read_mb_per_second": info["tokens"] * per_token / reading / 1e6,
        "kl_of_rebuilt_logits": float(kl.mean()),
        "count": tokens,
    }


def train_and_decode(run: Path, folder: Path, variant: Variant, draft: str, seed: int, size: Size) -> Entry:
    """One draft trained on one cache: its held-out acceptance, and per prompt the sums behind α and tokens per verify."""
    target, held_out = opened(run)
    started, reader = time.perf_counter(), CacheReader(folder / "caches" / variant.name)
    config = load_config(embedded("demo")).config
    changes = {"tokens": size.tokens, "validations": 1, "held_out_rows": size.held_out_rows}
    place = folder / "drafts" / f"{variant.name}-{draft}-{seed}"
    drafter: Drafter
    if draft == "eagle":
        settings = config.eagle["eagle3"].model_copy(update=changes)
        summary = train_eagle(target, reader, held_out, settings, place, seed)
        drafter = EagleDrafter(EagleHead.load(place, target))
    else:
        summary = distill(target, reader, held_out, config.distill.model_copy(update=changes), place, seed)
        drafter = LMDrafter(DraftLM.load(place / "distilled", target))
    evaluation = EvalSettings(prompts=size.prompts, max_new_tokens=size.new_tokens)
    texts = [text for group in held_out_prompts(held_out, evaluation, target.context).values() for text in group]
    decoded = {}
    for temperature in TEMPERATURES:
        results = decode_all(target, drafter, texts, evaluation, decoding(evaluation, temperature))
        decoded[str(temperature)] = [
            [sum(v.emitted for v in r.trace), len(r.trace), sum(map(sum, (v.overlaps for v in r.trace))), _reached(r)]
            for r in results
        ]
    seconds = time.perf_counter() - started
    acceptance = summary.expected_acceptance
    return {
        "key": draft_key(variant, draft, seed),
        "alpha_teacher_forced": acceptance[0],
        "expected_tokens_per_verify": 1 + float(np.cumprod(acceptance).sum()),
        "decoded": decoded,
        "seconds": round(seconds, 1),
    }


def _reached(result: Any) -> int:
    return sum(len(verify.overlaps) for verify in result.trace)


def make_cache(run: Path, folder: Path, variant: Variant, size: Size) -> None:
    rows = Rows.open(run / "rows", "train")
    build_cache(opened(run)[0], rows, folder / "caches" / variant.name, variant.settings, size.tokens)


def measure(run: Path, folder: Path, size: Size, workers: int) -> Journal:
    """Everything that the file of results lacks: bytes and times alone in this process, then caches and drafts in `workers`."""
    target, rows = opened(run)[0], Rows.open(run / "rows", "train")
    # Results of another target, other rows or another size are no results of this study.
    place = folder / f"results-{target.fingerprint()[:8]}-{rows.digest[:8]}-{size.tokens}.jsonl"
    journal = Journal(place, lambda entry: entry["key"])
    for name in ("demo", "wide"):
        keys = {f"bytes/{name}/{variant.name}": variant for variant in size.variants}
        if missing := {key: variant for key, variant in keys.items() if key not in journal.found}:
            model = target if name == "demo" else wide_target(target)
            states = live(model, rows, size.timed_tokens)
            for key, variant in missing.items():
                found = measure_bytes(model, rows, states, variant, size, folder / "timed")
                journal.add({"key": key} | found)
                print(f"{key}: {found}", flush=True)
    todo = {key: (run, folder, *task, size) for key, task in tasks(size)}
    variants = dict.fromkeys(variant for key, (*_, variant, _, _, _) in todo.items() if key not in journal.found)
    with processes(workers) as pool:
        for made in [pool.submit(make_cache, run, folder, variant, size) for variant in variants]:
            made.result()
    do_missing(journal, todo, train_and_decode, processes(workers))
    return journal


def tasks(size: Size) -> Iterator[tuple[str, tuple[Variant, str, int]]]:
    """Each training once, all variants of a seed before the next seed."""
    seen = set()
    for seed in range(size.seeds):
        for draft in DRAFTS:
            for variant in size.variants:
                key = draft_key(variant, draft, seed)
                if key not in seen:
                    seen.add(key)
                    yield key, (variant.trains(draft), draft, seed)


def draft_key(variant: Variant, draft: str, seed: int) -> str:
    return f"draft/{variant.trains(draft).name}/{draft}/{seed}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, nargs="?", default=Path("runs/demo"), help="its target and rows are used")
    parser.add_argument("--folder", type=Path, default=Path("runs/bench-cache"))
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    parser.add_argument(
        "--quick", action="store_true", help="a smoke test: three codecs, next to no training, no pages"
    )
    arguments = parser.parse_args()
    size = QUICK if arguments.quick else FULL
    ensure_run(arguments.run)
    folder = arguments.folder / ("quick" if arguments.quick else "full")
    found = measure(arguments.run, folder, size, arguments.workers).found
    study = Study()
    widths = {"demo": opened(arguments.run)[0].width, "wide": 1024}
    for name, width in widths.items():
        measured = {v.name: found[f"bytes/{name}/{v.name}"] for v in size.variants}
        study.add_bytes(name, width, measured, [variant.name for variant in SMALL[name]])
    for draft in DRAFTS:
        runs = {v.name: [found[draft_key(v, draft, seed)] for seed in range(size.seeds)] for v in size.variants}
        study.add_drafts(draft, size.tokens, runs, EXACT.name, [v.name for small in SMALL.values() for v in small])
    made = command("bench-cache", parser, arguments)
    publish_study("cache", "cache", made, study.rows, page, folder if arguments.quick else None)


if __name__ == "__main__":
    main()
