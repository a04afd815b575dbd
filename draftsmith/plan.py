"""What a command would do, told before: stages, parameters, bytes on disk. Loads no weights, writes nothing."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from draftsmith.config import Config
from draftsmith.errors import UserError
from draftsmith.run import RunFolder, schedule
from draftsmith.stages import TRAINED, Work, stage_units

if TYPE_CHECKING:
    from draftsmith.models.target import Target


def print_plan(config: Config) -> None:
    """Stages with the reason why each would run, then models and cache. Raises UserError for what cannot work."""
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
    models = Table(title="parameters", title_justify="left", title_style="bold", show_header=False)
    models.add_column("model")
    models.add_column("parameters", justify="right")
    for name, count in parameters(config, target).items():
        models.add_row(name, f"{count:,}")
    console.print(models)
    console.print(_cache_line(config, target, prepared=not reasons["prepare"]))


def shape_of_target(config: Config, work: Work) -> "Target":
    """The target without weights (on torch's meta device): from its folder or hub name, or as it would be trained."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from draftsmith.models.target import Target

    class Shape(Target):
        """A new head notes its target's fingerprint; without weights there is none."""

        def fingerprint(self) -> str:
            return ""

    if config.target.path is None:
        from draftsmith.train.pretrain import model_config

        shape: Any = model_config(config.target.scratch)
    else:
        work.check_target()
        shape = AutoConfig.from_pretrained(work.target_path, trust_remote_code=config.target.trust_remote_code)
    with torch.device("meta"):
        return Shape(AutoModelForCausalLM.from_config(shape))


def parameters(config: Config, target: "Target") -> dict[str, int]:
    """Stored numbers of the target and of every draft that would be trained, all without memory of their own."""
    import torch

    from draftsmith.models.eagle import new_eagle_head
    from draftsmith.models.target import choose_taps
    from draftsmith.models.vocabulary import DraftVocabulary
    from draftsmith.train.distill import new_draft

    taps = () if config.cache.taps == "none" else choose_taps(target.blocks, config.cache.taps)
    with torch.device("meta"):
        counts = {"target": _count(target.model), TRAINED: _count(new_draft(target, config.distill, config.seed).model)}
    for name, settings in config.eagle.items():
        size = min(settings.draft_vocabulary or target.vocabulary, target.vocabulary)
        vocabulary = DraftVocabulary(torch.arange(size), target.vocabulary)  # which tokens does not matter here
        with torch.device("meta"):
            head = new_eagle_head(
                target,
                taps,
                vocabulary,
                layers=settings.layers,
                kv_heads=settings.kv_heads,
                intermediate=settings.intermediate,
                head_from_target=False,
            )
        counts[name] = _count(head)
    return counts


def _count(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _cache_line(config: Config, target: "Target", prepared: bool) -> str:
    from draftsmith.data.cache.build import cache_bytes

    size = _expected_rows(config) if not prepared else _prepared_rows(config)
    if size is None:
        return "cache: size unknown; run `draftsmith prepare` first, or cap every domain in data.train_tokens"
    rows, tokens = size
    needed = cache_bytes(
        config.cache, tokens=tokens, rows=rows, width=target.width, vocabulary=target.vocabulary, blocks=target.blocks
    )
    free = shutil.disk_usage(_existing(config.run)).free
    known = "" if prepared else " at most"
    line = f"cache:{known} {tokens:,} tokens in {rows:,} rows, {needed / 1e6:,.1f} MB; {free / 1e9:,.1f} GB are free"
    if needed > free and not (config.run / "cache" / "manifest.json").is_file():
        raise UserError(f"{line}: too little; free some space, or lower cache.k or data.train_tokens")
    return line


def _prepared_rows(config: Config) -> tuple[int, int]:
    from draftsmith.data.rows import Rows

    rows = Rows.open(config.run / "rows", "train")
    return len(rows), rows.tokens


def _expected_rows(config: Config) -> tuple[int, int] | None:
    """Rows and tokens before anything is prepared, from the caps; None where a domain may have none."""
    data = config.data
    domains = {domain for source in data.sources for domain in source.possible_domains()}
    if not domains or not all(domain in data.train_tokens for domain in domains):
        return None
    tokens = sum(data.train_tokens[domain] for domain in domains)
    return -(-tokens // data.max_length), tokens


def _existing(path: Path) -> Path:
    return path if path.exists() else _existing(path.absolute().parent)
