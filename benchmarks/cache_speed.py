"""`make bench-cache-speed`: how much of the bare target forward's speed is left when its work is cached, and where the time goes.

Both sides are timed in this process, in turn, on the same batches: the target with its logits, and `build_cache` into an empty
folder with all that belongs to it (codecs, self-check, checksums, flushes). A ratio's range is that of the rounds. Reads the
target and the rows of a finished run (runs/demo) and writes docs/studies/cache-speed.json.
"""

import argparse
import dataclasses
import json
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from draftsmith.data.batches import collate_rows, fill_batches
from draftsmith.data.cache import build, writer
from draftsmith.data.cache.build import build_cache, shard_plan
from draftsmith.data.cache.codecs import DISTRIBUTION_CODECS, STATE_CODECS
from draftsmith.data.cache.fields import bytes_per_token, cache_fields
from draftsmith.data.cache.manifest import CacheSettings
from draftsmith.data.corpus import DataSettings
from draftsmith.data.rows import Rows, write_rows
from draftsmith.environment import describe_environment
from draftsmith.files import publish_json
from draftsmith.models.target import Target

STUDY = Path("docs/studies/cache-speed.json")
MINE = "caching speed"  # how the names of this program's rows begin; those of others are left alone


def wide_target(path: Path, blocks: int) -> Target:
    """A random target of width 1024 with 32,000 tokens in its vocabulary, which reads the rows of the run's tokenizer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=blocks,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=1024,
    )
    return Target(AutoModelForCausalLM.from_config(config), AutoTokenizer.from_pretrained(path), "wide")


def cut_rows(rows: Rows, length: int, tokens: int, folder: Path) -> Rows:
    """The first rows, cut to `length`: the one row per shard that is checked then costs a few tokens' share of them all."""
    chosen = [rows[index] for index in range(min(len(rows), 1 + tokens // length))]
    short = [row._replace(token_ids=row.token_ids[:length], supervised=row.supervised[:length]) for row in chosen]
    write_rows(short, folder / "train", DataSettings(), rows.tokenizer)
    return Rows.open(folder, "train")


@torch.inference_mode()
def bare_forward(target: Target, rows: Rows, taken: int, settings: CacheSettings) -> None:
    """The target's logits for the batches that `build_cache` makes of the first `taken` rows, kept nowhere."""
    size = bytes_per_token(cache_fields(settings, target.width, target.vocabulary, target.blocks))
    for first, end in shard_plan(rows.lengths[:taken], rows.shared[:taken], int(settings.shard_mb * build.MB), size):
        lengths = rows.lengths[first:end]
        for batch in fill_batches(np.argsort(lengths, kind="stable"), lengths, settings.batch_tokens):
            target.forward(collate_rows([rows[first + index] for index in batch]).token_ids)


class Clock:
    """Adds up seconds by name. Threads may run at the same time: the sum can exceed the wall clock."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def timed(self, name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return inner(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - started

        return call


@contextmanager
def watched(target: Target, clock: Clock) -> Iterator[None]:
    """The parts of caching under the clock; all is as before afterwards."""
    places: list[tuple[Any, str, str]] = [
        (target, "forward", "forward"),
        (target, "head", "head"),
        (build._Shard, "_put", "copy"),
        (build, "self_check", "self-check"),
        (writer.CacheWriter, "add", "checksum + write (in the thread)"),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
    codecs: list[tuple[dict[str, Any], str]] = [(STATE_CODECS, "encode"), (DISTRIBUTION_CODECS, "top-k")]
    kept = [dict(registry) for registry, _ in codecs]
    for owner, name, label in places:
        setattr(owner, name, clock.timed(label, getattr(owner, name)))
    for registry, label in codecs:
        for name, codec in registry.items():
            registry[name] = dataclasses.replace(codec, encode=clock.timed(label, codec.encode))
    try:
        yield
    finally:
        for owner, name, value in before:
            if owner is target:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        for (registry, _), old in zip(codecs, kept, strict=True):
            registry.update(old)


def study(
    name: str, target: Target, rows: Rows, tokens: int, rounds: int, goal: float, place: Path
) -> list[dict[str, Any]]:
    """Rows of the study for one target: the ratio over the rounds, then the share of each part in one more run."""
    target.fingerprint()  # of the weights, computed once for a target
    settings = CacheSettings()
    taken = max(1, int(np.searchsorted(np.cumsum(rows.lengths), tokens, side="right")))
    done = int(rows.lengths[:taken].sum())

    def cache() -> None:
        build_cache(target, rows, place / "cache", settings, train_tokens=done)
        shutil.rmtree(place / "cache")

    def seconds(work: Callable[[], None]) -> tuple[float, float]:
        """On the wall, and of the processor in all threads: the second does not mind what else the machine does."""
        started, used = time.perf_counter(), time.process_time()
        work()
        return time.perf_counter() - started, time.process_time() - used

    def bare() -> None:
        bare_forward(target, rows, taken, settings)

    bare_forward(target, rows, 8, settings)  # kernels and memory are warm for both
    took: dict[str, list[tuple[float, float]]] = {"bare": [], "cache": []}
    for number in range(rounds):
        for work in (bare, cache) if number % 2 == 0 else (cache, bare):
            took[work.__name__].append(seconds(work))
        rates = [done / took[side][-1][0] for side in took]
        print(f"{name}: bare {rates[0]:,.0f}, caching {rates[1]:,.0f} tokens/s", flush=True)
    about = {
        "target": name,
        "tokens": done,
        "threads": torch.get_num_threads(),
        "longest_row": int(rows.lengths[:taken].max()),
        "cache": settings.model_dump(mode="json"),
        "bare": "forward with logits of every slot, padding included",
    }
    wall, processor = np.asarray(took["bare"]).T / np.asarray(took["cache"]).T
    over = _interval(wall)
    met = {"goal": f">= {goal}", "met": over["value"] >= goal}
    found: list[dict[str, Any]] = [
        {"what": f"{MINE} over the bare forward's, {name}", **over, "settings": about, **met},
        {
            "what": f"{MINE} over the bare forward's by processor time, {name}",
            **_interval(processor),
            "settings": about,
        },
    ]
    for side, label in (("bare", "of the bare forward"), ("cache", "of caching")):
        rate = _interval(done / np.asarray(took[side])[:, 0])
        found.append({"what": f"{MINE}: tokens/s {label}, {name}", **rate, "settings": about})
    clock = Clock()
    with watched(target, clock):
        whole, _ = seconds(cache)
    for part, spent in clock.seconds.items():
        found.append({"what": f"{MINE}: share of the time, {part}, {name}", "value": spent / whole, "settings": about})
    return found


def _interval(values: np.ndarray) -> dict[str, float]:
    """Median and range over the rounds."""
    return {
        "value": float(np.median(values)),
        "low": float(values.min()),
        "high": float(values.max()),
        "count": len(values),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="a finished run, such as runs/demo")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=("demo", "wide"), help="one target; the rows of the other stay as they are")
    parser.add_argument("--tokens", type=int, default=27000, help="per round, small target")
    parser.add_argument("--wide-tokens", type=int, default=10000, help="per round, width-1024 target")
    parser.add_argument("--wide-row", type=int, default=256, help="tokens of a row at most, width-1024 target")
    parser.add_argument("--wide-blocks", type=int, default=8)
    options = parser.parse_args()
    rows = Rows.open(options.run / "rows", "train")
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        if options.only != "wide":
            small = Target.load(options.run / "target")
            found += study("demo target", small, rows, options.tokens, options.rounds, 0.7, Path(place))
        if options.only != "demo":
            short = cut_rows(rows, options.wide_row, options.wide_tokens, Path(place) / "rows")
            wide = wide_target(options.run / "target", options.wide_blocks)
            found += study("width 1024", wide, short, options.wide_tokens, options.rounds, 0.9, Path(place))
    old = json.loads(STUDY.read_text())["rows"] if STUDY.exists() else []
    measured = {row["settings"]["target"] for row in found}  # the other target's rows stay
    rest = [row for row in old if row["settings"]["target"] not in measured]
    study_of = {"environment": describe_environment(), "command": "make bench-cache-speed", "rows": rest + found}
    publish_json(STUDY, study_of)
    for row in found:
        spread = f" [{row['low']:.3g}, {row['high']:.3g}]" if "low" in row else ""
        print(f"{row['what']}: {row['value']:.3g}{spread} {row.get('goal', '')} {row.get('met', '')}")


if __name__ == "__main__":
    main()
