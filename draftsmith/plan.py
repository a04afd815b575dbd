"""What a command would do, told before: stages, parameters, bytes on disk. Loads no weights, writes nothing."""

import functools
import json
import shutil
import urllib.error
import urllib.request
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


def print_plan(
    config: Config,
    tokens_per_second: float | None = None,
    measure: bool = False,
    train_tokens_per_second: float | None = None,
) -> None:
    """Stages with the reason why each would run, then models and cache. Raises UserError for what cannot work.

    The time of caching is told at the rate `tokens_per_second`, or at that of one batch of the target if `measure`; that of
    training at `train_tokens_per_second`, or at the rate of the draft's last training in this run folder.
    """
    work, folder = Work(config, print), RunFolder(config.run)
    reasons = schedule(stage_units(config, work), folder)
    table = Table(title=f"plan of {config.run}", title_justify="left", title_style="bold")
    table.add_column("stage")
    table.add_column("would")
    for key, reason in reasons.items():
        table.add_row(key, f"run ({reason})" if reason else "be skipped: unchanged")
    console = Console()
    console.print(table)
    target = shape_of_target(config, work)
    console.print(_models(config, target, work, train_tokens_per_second))
    if measure and tokens_per_second is None:
        tokens_per_second = _measured_rate(config, work, trained=not reasons["target"])
    console.print(_cache_line(config, target, not reasons["prepare"], tokens_per_second))


def _models(config: Config, target: "Target", work: Work, rate: float | None) -> Table:
    """What every model takes: numbers, memory to train it on one rank (FSDP2 divides that by the ranks), and time."""
    from draftsmith.train.optim import training_bytes

    table = Table(title="models", title_justify="left", title_style="bold")
    table.add_column("model")
    for column in ("parameters", "memory to train", "time", "tokens/s"):
        table.add_column(column, justify="right")
    table.add_row("target", f"{_count(target.model):,}")
    tokens = {TRAINED: config.distill.tokens} | {name: head.tokens for name, head in config.eagle.items()}
    for name, model in drafts(config, target, work).items():
        speed = rate or _last_rate(config.run / ("draft" if name == TRAINED else f"eagle/{name}") / "training.jsonl")
        time = (_duration(tokens[name] / speed), f"{speed:,.0f}") if speed else ()
        table.add_row(name, f"{_count(model):,}", f"{training_bytes(model) / 1e9:,.2f} GB", *time)
    return table


def _last_rate(log: Path) -> float | None:
    """Tokens/s at the end of a training that was done here; None where there was none."""
    try:
        return float(json.loads(log.read_text(encoding="utf-8").splitlines()[-1])["tokens_per_second"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


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
    except OSError:
        return False


def drafts(config: Config, target: "Target", work: Work) -> dict[str, "nn.Module"]:
    """Every draft that would be trained, without memory of its own."""
    import torch

    from draftsmith.models.draft import DraftLM
    from draftsmith.models.target import choose_taps
    from draftsmith.models.vocabulary import DraftVocabulary
    from draftsmith.train.distill import new_draft, place
    from draftsmith.train.eagle import new_head

    taps = () if config.cache.taps == "none" else choose_taps(target.blocks, config.cache.taps)
    if config.distill.starts_from == "checkpoint":
        draft = DraftLM.shape_of(_architecture(place(config.distill.checkpoint), work), target)
    else:
        with torch.device("meta"):
            draft = new_draft(target, config.distill, config.seed)
    found: dict[str, nn.Module] = {TRAINED: draft.model}
    for name, settings in config.eagle.items():
        size = settings.draft_vocabulary  # how many tokens a share of them takes is known once they are counted
        size = target.vocabulary if size is None or isinstance(size, float) else min(size, target.vocabulary)
        vocabulary = DraftVocabulary(torch.arange(size), target.vocabulary)  # which tokens does not matter here
        bare = settings.model_copy(update={"head_from_target": False})
        with torch.device("meta"):
            found[name] = new_head(target, taps, vocabulary, bare)
    return found


def _count(module: "nn.Module") -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _cache_line(config: Config, target: "Target", prepared: bool, tokens_per_second: float | None) -> str:
    from draftsmith.data.cache.build import cache_bytes

    size = _expected_rows(config) if not prepared else _prepared_rows(config)
    if size is None:
        return "cache: size unknown; run `draftsmith prepare` first, or cap every domain in data.train_tokens"
    lengths, shared = size
    tokens = int(lengths.sum())
    known = "" if prepared else " at most"
    line = f"cache:{known} {tokens:,} tokens in {len(lengths):,} rows"
    if tokens_per_second is not None:
        line += f", {_duration(tokens / tokens_per_second)} at {tokens_per_second:,.0f} tokens/s"
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


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:,.0f} seconds"


def _prepared_rows(config: Config) -> tuple["np.ndarray", "np.ndarray"]:
    """Tokens of each row, and how many of them it shares with the row before."""
    from draftsmith.data.rows import Rows

    rows = Rows.open(config.run / "rows", "train")
    return rows.lengths, rows.shared


def _expected_rows(config: Config) -> tuple["np.ndarray", "np.ndarray"] | None:
    """The same before anything is prepared, from the caps, with nothing shared; None where a domain may have no cap."""
    import numpy as np

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
