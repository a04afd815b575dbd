"""What a command would do, told before: stages, parameters, bytes on disk. Loads no weights, writes nothing."""

import functools
import json
import math
import resource
import shutil
import urllib.error
import urllib.request
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from draftsmith.config import Config
from draftsmith.errors import UserError, first_line
from draftsmith.run import RunFolder, schedule
from draftsmith.stages import stage_units
from draftsmith.work import TRAINED, Work

if TYPE_CHECKING:
    import numpy as np
    from torch import nn

    from draftsmith.models.target import Target
    from draftsmith.train.memory import Memory
    from draftsmith.train.settings import EagleTrainSettings, TrainSettings


@dataclass(frozen=True)
class Rates:
    """Tokens/s as stated for the machine that will do it (None: not stated), of the target at work and of a draft's training;
    measure: time one batch of the target on this machine. What was measured stands beside what is stated, not in its place."""

    target: float | None = None
    training: float | None = None
    measure: bool = False

    def __post_init__(self) -> None:
        if any(rate is not None and not (math.isfinite(rate) and rate > 0) for rate in (self.target, self.training)):
            raise UserError("a stated rate must be a number of tokens/s; give one such as 5000")


def print_plan(config: Config, rates: Rates = Rates()) -> None:
    """Stages with the reason why each would run, then models with their memory, and the cache. Raises UserError for what cannot
    work."""
    from draftsmith.data.importers import dump_taps
    from draftsmith.train.memory import LEFT_OUT

    work, folder = Work(config, print), RunFolder(config.run)
    reasons = schedule(stage_units(config, work), folder)
    table = _table(f"plan of {config.run}", "stage", "would")
    for key, reason in reasons.items():
        table.add_row(key, f"run ({reason})" if reason else "be skipped: unchanged")
    console = Console()
    console.print(table)
    target = shape_of_target(config, work)
    if config.cache.imported is not None:  # the cache has the layers of the dump, and its rows once it is read
        taken = config.cache.model_copy(update={"taps": dump_taps(config.cache.imported, target.blocks)})
        config = config.model_copy(update={"cache": taken})
    trained = drafts(config, target, work)
    known = not reasons["prepare" if config.cache.imported is None else "cache"]
    rows = _prepared_rows(config) if known else _expected_rows(config)
    longest = config.data.max_length if rows is None else int(rows[0].max())
    memory = {name: _memory(config, name, model, target, longest) for name, model in trained.items()}
    console.print(_models(config, target, trained, memory, rates.training))
    for name, found in memory.items():
        console.print(_memory_table(name, found))
    console.print(f"memory leaves out {LEFT_OUT}")
    measured = _measured_rate(config, work, trained=not reasons["target"]) if rates.measure else None
    times = {"stated": rates.target, "measured on one batch here": measured}
    console.print(_cache_line(config, target, rows, known, times))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column)
    return table


def _models(
    config: Config, target: "Target", trained: dict[str, "nn.Module"], memory: dict[str, "Memory"], stated: float | None
) -> Table:
    """What every model takes: numbers, memory to train it on one rank, and time at the rate measured here and at that stated."""
    table = _table("models", "model")
    for column in ("parameters", "memory to train", "time as last measured here", "time as stated"):
        table.add_column(column, justify="right")
    table.add_row("target", f"{_count(target.model):,}")
    for name, model in trained.items():
        measured = _last_rate(config.run / ("draft" if name == TRAINED else f"eagle/{name}") / "training.jsonl")
        times = [_time(_training(config, name).tokens, rate) for rate in (measured, stated)]
        table.add_row(name, f"{_count(model):,}", _size(memory[name].total), *times)
    return table


def _time(tokens: int, rate: float | None) -> str:
    return "" if rate is None else f"{_duration(tokens / rate)} at {rate:,.0f} tokens/s"


def _training(config: Config, name: str) -> "TrainSettings":
    return config.distill if name == TRAINED else config.eagle[name]


def _memory(config: Config, name: str, model: "nn.Module", target: "Target", longest: int) -> "Memory":
    from draftsmith.train.memory import Run, training_memory

    run = Run(model, target, _training(config, name), config.cache, longest, config.target.dtype)
    return training_memory(run, process=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def _memory_table(name: str, memory: "Memory") -> Table:
    """Every term with its arithmetic; of the moments that follow each other, the largest is marked and counted."""
    table = _table(f"memory to train {name} on one rank: {_size(memory.total)}", "when", "what")
    table.add_column("MB", justify="right")
    table.add_column("arithmetic")
    parts = {"always": memory.held} | {
        f"{at}, the most" if at == memory.largest else at: terms for at, terms in memory.moments.items()
    }
    for when, terms in parts.items():
        for term in terms:
            table.add_row(when, term.name, f"{term.bytes / 1e6:,.1f}", term.arithmetic, end_section=term is terms[-1])
            when = ""
    return table


def _last_rate(log: Path) -> float | None:
    """Tokens/s at the end of a training that was done here; None where there was none."""
    try:
        rate = float(json.loads(log.read_text(encoding="utf-8").splitlines()[-1])["tokens_per_second"])
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return rate if math.isfinite(rate) and rate > 0 else None


def shape_of_target(config: Config, work: Work) -> "Target":
    """The target without weights (on torch's meta device): from its folder or hub name, or as it would be trained."""
    import torch
    from transformers import AutoModelForCausalLM

    from draftsmith.models.target import Target

    class Shape(Target):
        """A new head notes its target's fingerprint; without weights there is none."""

        def fingerprint(self) -> str:
            return ""

    if config.target.path is None:
        from draftsmith.train.pretrain import model_config

        shape: Any = model_config(config.target.scratch)
    else:
        if Path(work.target_path).exists():
            work.check_target()
        shape = _architecture(work.target_path, work, config.target.trust_remote_code)
    with torch.device("meta"):
        return Shape(AutoModelForCausalLM.from_config(shape))


def _architecture(name: str, work: Work, trust_remote_code: bool = False) -> Any:
    """The `transformers` configuration at a folder or hub name; where the hub has no answer, the published sizes that we keep.

    Raises UserError where there are none of these either.
    """
    from transformers import AutoConfig

    local = Path(name).exists()
    try:
        offline = not local and not _hub_answers()
        return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code, local_files_only=offline)
    except (OSError, ValueError) as error:
        reason = "the hub cannot be reached" if offline else first_line(error)
        kept = resources.files("draftsmith.configs").joinpath("shapes", f"{name.rpartition('/')[2].lower()}.json")
        if local or not kept.is_file():
            raise UserError(f"{name}: no configuration of it ({reason}); give a folder or a hub name") from error
    about = json.loads(kept.read_text(encoding="utf-8"))
    work.say(f"{name}: {reason}; its published sizes are taken from configs/shapes/{kept.name} ({about['source']})")
    return AutoConfig.for_model(**about["config"])


@functools.cache
def _hub_answers() -> bool:
    """Whether the hub answers within seconds: `transformers` would ask for half a minute, once per model."""
    from huggingface_hub import constants

    try:
        with urllib.request.urlopen(constants.ENDPOINT, timeout=5):
            return True
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):  # ValueError: HF_ENDPOINT is no address
        return False


def drafts(config: Config, target: "Target", work: Work) -> dict[str, "nn.Module"]:
    """Every draft that would be trained, without memory of its own."""
    import torch

    from draftsmith.models.draft import DraftLM
    from draftsmith.models.eagle import EagleHead
    from draftsmith.models.eagle_start import check_start
    from draftsmith.models.target import choose_taps
    from draftsmith.models.vocabulary import DraftVocabulary
    from draftsmith.train.distill import new_draft, place
    from draftsmith.train.eagle import layer_start, new_head

    taps = () if config.cache.taps == "none" else choose_taps(target.blocks, config.cache.taps)
    if config.distill.starts_from == "checkpoint":
        draft = DraftLM.shape_of(_architecture(place(config.distill.checkpoint), work), target)
    else:
        with torch.device("meta"):
            draft = new_draft(target, config.distill, config.seed)
    if config.distill.selective is not None:
        try:
            _architecture(place(config.distill.selective.reference), work)
        except UserError as error:
            raise UserError(f"distill.selective.reference: {error}") from error
    found: dict[str, nn.Module] = {TRAINED: draft.model}
    for name, settings in config.eagle.items():
        if settings.start is not None:
            found[name] = _started(Path(settings.start).expanduser(), target, taps, settings)
            continue
        size = settings.draft_vocabulary  # how many tokens a share of them takes is known once they are counted
        size = target.vocabulary if size is None or isinstance(size, float) else min(size, target.vocabulary)
        vocabulary = DraftVocabulary(torch.arange(size), target.vocabulary)  # which tokens does not matter here
        bare = settings.model_copy(update={"head_from_target": False})
        with torch.device("meta"):
            found[name] = head = new_head(target, taps, vocabulary, bare)
        if isinstance(head, EagleHead):
            check_start(head.config, layer_start(head.config, settings), settings.head_from_target)
    return found


def _started(folder: Path, target: "Target", taps: tuple[int, ...], settings: "EagleTrainSettings") -> "nn.Module":
    """The head that a training continues from; it must fuse what the cache will hold."""
    from draftsmith.models.eagle import EagleHead
    from draftsmith.train.eagle import started_shape, tap_columns

    head = started_shape(folder, target, settings)
    if isinstance(head, EagleHead) and head.config.taps:
        tap_columns(taps, settings.model_copy(update={"taps": head.config.taps}))
    return head


def _count(module: "nn.Module") -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _cache_line(
    config: Config,
    target: "Target",
    size: tuple["np.ndarray", "np.ndarray"] | None,
    prepared: bool,
    rates: dict[str, float | None],
) -> str:
    """rates: tokens/s of the target, by where they are from."""
    from draftsmith.data.cache.build import cache_bytes

    if size is None and config.cache.imported is not None:
        return f"cache: size unknown until {config.cache.imported.path} is imported (`draftsmith cache`)"
    if size is None:
        return "cache: size unknown; run `draftsmith prepare` first, or cap every domain in data.train_tokens"
    lengths, shared = size
    tokens = int(lengths.sum())
    known = "" if prepared else " at most"
    line = f"cache:{known} {tokens:,} tokens in {len(lengths):,} rows"
    line += "".join(f", {_time(tokens, rate)} ({origin})" for origin, rate in rates.items() if rate is not None)
    if config.cache.online:
        return f"{line}; online: computed at every use, nothing on disk"
    shape = {"width": target.width, "vocabulary": target.vocabulary, "blocks": target.blocks}
    needed = cache_bytes(config.cache, lengths=lengths, shared=shared, **shape)
    free = shutil.disk_usage(_existing(config.run)).free
    line += f", {needed / 1e6:,.1f} MB; {free / 1e9:,.1f} GB are free"
    there = sum(shard.stat().st_size for shard in (config.run / "cache").glob("shard-*.safetensors"))
    if needed - there > free:
        raise UserError(f"{line}: too little; free some space, or lower cache.k or data.train_tokens")
    return line


def _measured_rate(config: Config, work: Work, trained: bool) -> float:
    """Of the target at work. Raises UserError where its weights are not here: `plan` downloads and trains nothing."""
    from draftsmith.data.cache.build import measured_rate

    if not (trained and Path(work.target_path).is_dir()):
        raise UserError("--measure: the target's weights are not on this machine; give --tokens-per-second instead")
    return measured_rate(work.target, config.cache, min(config.data.max_length, work.target.context))


def _size(count: int) -> str:
    """Bytes for people."""
    return f"{count / 1e6:,.0f} MB" if count < 1e10 else f"{count / 1e9:,.1f} GB"


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:,.0f} seconds"


def _prepared_rows(config: Config) -> tuple["np.ndarray", "np.ndarray"]:
    """Tokens of each row that is cached, and how many of them it shares with the row before."""
    from draftsmith.data.rows import Rows

    rows = Rows.open(config.run / ("imported-rows" if config.cache.imported else "rows"), "train")
    return rows.lengths, rows.shared


def _expected_rows(config: Config) -> tuple["np.ndarray", "np.ndarray"] | None:
    """The same before anything is prepared, from the caps, with nothing shared; None where a domain may have no cap."""
    import numpy as np

    if config.cache.imported is not None:
        return None  # they are the dump's
    data = config.data
    domains = {domain for source in data.sources for domain in source.possible_domains()}
    if not domains or not all(domain in data.train_tokens for domain in domains):
        return None
    tokens = sum(data.train_tokens[domain] for domain in domains)
    lengths = np.full(-(-tokens // data.max_length), data.max_length)
    lengths[-1] -= lengths.sum() - tokens
    return lengths, np.zeros_like(lengths)


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.absolute().parent)
