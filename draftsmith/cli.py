"""The `draftsmith` command: arguments in, exit code out (0 done, 2 the user's input is wrong, 1 a fault of ours,
such as a draft whose greedy output differs from plain decoding, 3 a draft that misses a threshold, 130 and 143 ended by SIGINT
and SIGTERM).

Imports nothing heavy before a command runs, so that `--help` is instant.
"""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from draftsmith.errors import Stopped, UserError, first_line

if TYPE_CHECKING:
    from draftsmith.config import Loaded
    from draftsmith.work import Work

app = typer.Typer(
    name="draftsmith",
    help="Train draft models and EAGLE heads for speculative decoding, and measure what they are worth.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the experiment", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY.SUB=VALUE]...", help="fields of the config to override", show_default=False),
]


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit with its code."""
    try:
        app(args=arguments, prog_name="draftsmith")
    except UserError as error:
        print(f"draftsmith: {error}", file=sys.stderr)
        sys.exit(2)
    except Stopped as stopped:
        print(f"draftsmith: {stopped}", file=sys.stderr)
        sys.exit(128 + stopped.signal)
    except OSError as error:
        from draftsmith.run import NOT_OURS, disk_is_full

        if error.errno in NOT_OURS:
            print(f"draftsmith: {first_line(error)}; allow it, or give another run_root", file=sys.stderr)
            sys.exit(2)
        if not disk_is_full(error):
            raise
        text = f"the disk is full ({first_line(error)}); free some space and run the same command again"
        print(f"draftsmith: {text}", file=sys.stderr)
        sys.exit(2)
    sys.exit(0)


def say(text: str) -> None:
    """Print one line at once, also into a log file; of several ranks the main one alone."""
    from draftsmith.files import is_main

    if is_main():
        print(text, flush=True)


def _stop(number: int) -> NoReturn:
    raise Stopped(number, "stopped; what is finished is kept, and the same command continues from there")


def _load(config: Path, overrides: list[str] | None) -> "Loaded":
    if not config.exists():  # said before the schema and torch are imported
        raise UserError(f"{config}: no such config; give the path of a YAML file, such as configs/demo.yaml")
    from draftsmith.config import load_config

    return load_config(config, overrides or ())


def _run(loaded: "Loaded", stage: str) -> Path:
    """Run what `stage` needs and is not up to date; returns the run folder."""
    from transformers.utils import logging

    from draftsmith.files import is_main
    from draftsmith.run import RunFolder, execute, needed, schedule
    from draftsmith.stages import stage_units
    from draftsmith.train.signals import on_signals
    from draftsmith.work import Work

    logging.disable_progress_bar()  # the stages have their own; bars of single files are noise beside them
    with on_signals(_stop):
        work = Work(loaded.config, say)
        units, folder = needed(stage_units(loaded.config, work), stage), RunFolder(loaded.config.run)
        if loaded.config.target.trust_remote_code:
            say(
                f"WARNING: target.trust_remote_code is on: code that comes with {loaded.config.target.path} runs as you"
            )
        if not is_main():
            execute(units, folder, say)
            return folder.path
        folder.make()
        with folder.lock():
            folder.describe(loaded)
            try:
                if any(schedule(units, folder).values()):
                    work.write_environment()
                execute(units, folder, say)
            finally:
                work.tracking.close()
    return folder.path


def _work(loaded: "Loaded") -> "Work":
    from draftsmith.work import Work

    return Work(loaded.config, say)


def _check_inputs_of_cache(loaded: "Loaded") -> None:
    """Raises UserError where the target or the rows must come first."""
    from draftsmith.run import RunFolder, needed, schedule
    from draftsmith.stages import stage_units

    reasons = schedule(needed(stage_units(loaded.config, _work(loaded)), "cache"), RunFolder(loaded.config.run))
    if stale := [key for key, reason in reasons.items() if reason and key != "cache"]:
        raise UserError(f"{loaded.config.run}: {stale[0]} is not up to date; run `draftsmith prepare` first")


def _print_results(run: Path) -> bool:
    """Tables and verdict. Returns whether a greedy output differs from plain decoding, or training contradicts decoding."""
    from rich.console import Console

    from draftsmith.eval.report import console_tables, verdict
    from draftsmith.eval.results import left_out, load_results
    from draftsmith.evaluate import contradictions

    results = load_results(run)
    console = Console(width=None if sys.stdout.isatty() else 120)
    for table in console_tables(results):
        console.print(table)
    if stale := left_out(run):
        say(f"left out: {', '.join(stale)}")
    judged = verdict(results)
    say(judged.text)
    return contradictions(run, say) or judged.tone == "inexact"


@app.command()
def demo(overrides: Overrides = None) -> None:
    """Run all stages on the embedded default config and print what the drafts are worth."""
    from draftsmith.config import embedded

    run = _run(_load(embedded("demo"), overrides), "report")
    at_fault = _print_results(run)
    say(f"report: {run / 'report.html'}")
    if at_fault:
        raise typer.Exit(1)


@app.command()
def target(config: ConfigPath, overrides: Overrides = None) -> None:
    """Train a small target from scratch, where the config asks for one."""
    _run(_load(config, overrides), "target")


@app.command()
def prepare(config: ConfigPath, overrides: Overrides = None) -> None:
    """Turn text and conversations into token rows with loss masks."""
    _run(_load(config, overrides), "prepare")


@app.command()
def regenerate(config: ConfigPath, overrides: Overrides = None) -> None:
    """Have the target itself answer the conversations of the data, here or through a server."""
    from draftsmith.work import Work

    loaded = _load(config, overrides)
    if loaded.config.regenerate.base_url is None:
        _run(loaded, "target")
    Work(loaded.config, say).regenerate()


@app.command()
def cache(config: ConfigPath, overrides: Overrides = None) -> None:
    """Write the target's distributions and hidden states to disk; as one of several ranks under `torchrun` or `accelerate`."""
    _run(_load(config, overrides), "cache")


@app.command("import-states")
def import_states(
    config: ConfigPath,
    dump: Annotated[Path, typer.Option("--from", help="folder of the dump", show_default=False)],
    form: Annotated[str, typer.Option("--format", help="speculators or specforge", show_default=False)],
    overrides: Overrides = None,
) -> None:
    """Make the cache from another project's hidden-state dump of the same target, checked against it.

    The same as `cache` with cache.imported set; to train on it, keep that section in the config.
    """
    given = [f"cache.imported.format={form}", f"cache.imported.path={json.dumps(str(dump))}"]
    loaded = _load(config, [*given, *(overrides or ())])
    _run(loaded, "cache")
    about = loaded.config.cache.imported
    assert about is not None
    section = json.dumps({"cache": {"imported": about.model_dump(mode="json", exclude_defaults=True)}})
    say(f"to train on it, keep in {config} (JSON is YAML): {section}")


@app.command()
def distill(config: ConfigPath, overrides: Overrides = None) -> None:
    """Train a draft LM on the cache."""
    _run(_load(config, overrides), "distill")


@app.command("train-eagle")
def train_eagle(config: ConfigPath, overrides: Overrides = None) -> None:
    """Train the config's heads (EAGLE, Medusa) on the cache."""
    _run(_load(config, overrides), "train-eagle")


@app.command("eval-acceptance")
def eval_acceptance(
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG", help="YAML file of the experiment", show_default=False)
    ] = None,
    overrides: Overrides = None,
    min_tokens_per_verify: Annotated[float | None, typer.Option(help="exit with 3 below this")] = None,
    min_alpha: Annotated[float | None, typer.Option(help="exit with 3 below this")] = None,
    min_speedup: Annotated[float | None, typer.Option(help="exit with 3 below this; 1 is plain decoding")] = None,
    baseline: Annotated[
        Path | None, typer.Option(help="result or run folder; exit with 3 if significantly worse")
    ] = None,
    draft: Annotated[list[str] | None, typer.Option(help="judge this draft alone (may be repeated)")] = None,
    again: Annotated[
        Path | None, typer.Option(metavar="RESULT", help="measure this result anew and compare; takes no config")
    ] = None,
) -> None:
    """Measure alpha, tokens per verify, speed and exactness of every draft; hold them against thresholds or a saved result."""
    from draftsmith.evaluate import MISSED, Gates, check_asked, judge
    from draftsmith.evaluate import again as measure_again

    if again is not None:
        if config is not None:
            raise UserError(f"--again {again}: the result's file says all; leave {config} out")
        if not measure_again(again, say):
            raise typer.Exit(1)
        return
    if config is None:
        raise UserError("eval-acceptance: give a config, or --again with a result")
    loaded = _load(config, overrides)
    check_asked(draft or (), loaded.config.evaluation.drafts)
    run = _run(loaded, "eval-acceptance")
    at_fault = _print_results(run)
    missed = judge(run, Gates(min_tokens_per_verify, min_alpha, min_speedup, baseline, draft or ()), say)
    if at_fault or missed:
        raise typer.Exit(1 if at_fault else MISSED)


@app.command()
def tune(config: ConfigPath, overrides: Overrides = None) -> None:
    """Choose draft, length, tree and limits for serving this target; writes skill-speculative-tuning.md."""
    from draftsmith.tuning import print_choice

    print_choice(_run(_load(config, overrides), "tune"), say)


@app.command()
def theory(
    alpha: Annotated[list[float] | None, typer.Option(help="acceptance of one drafted token; repeatable")] = None,
    draft_cost: Annotated[
        float, typer.Option("-c", "--draft-cost", min=0, help="of one draft step, in target steps")
    ] = 0.05,
    verify_cost: Annotated[float, typer.Option(help="of one verify, in target steps")] = 1.0,
    most: Annotated[int, typer.Option(min=1, max=1000, help="longest chain in the table")] = 12,
    plot: Annotated[Path | None, typer.Option(help="draw it: a file ending in .svg, .png or .pdf")] = None,
) -> None:
    """Tokens per verify and speed-up against K as the textbook has them, and the best K."""
    from draftsmith.theory_command import print_theory

    print_theory(tuple(alpha or (0.5, 0.7, 0.9)), draft_cost, verify_cost, most, plot, say)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="run folder, such as runs/demo", show_default=False)],
) -> None:
    """Rebuild the HTML report of a run."""
    from draftsmith.eval.report import build_report
    from draftsmith.run import RunFolder

    with RunFolder(run).lock():
        page = build_report(run)
    _print_results(run)
    say(f"report: {page}")


@app.command()
def dashboards(
    place: Annotated[
        str, typer.Argument(metavar="RUN_OR_PROJECT", help="run folder, project or entity/project", show_default=False)
    ],
    dry_run: Annotated[
        Path | None, typer.Option("--dry-run", metavar="FILE", help="write what would be made as JSON, make nothing")
    ] = None,
) -> None:
    """Set up the W&B workspace and report of a project."""
    from draftsmith.dashboards import make_dashboards, write_definition

    if dry_run is not None:
        write_definition(place, dry_run)
        say(f"dashboards: {dry_run}")
        return
    for address in make_dashboards(place):
        say(f"dashboards: {address}")


@app.command()
def plan(
    config: ConfigPath,
    overrides: Overrides = None,
    tokens_per_second: Annotated[
        float | None,
        typer.Option(min=1, help="tokens/s of the target on the machine meant; tells how long caching takes"),
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="time one batch of the target here for that, too")] = False,
    train_tokens_per_second: Annotated[
        float | None,
        typer.Option(
            min=1, help="tokens/s of training on the machine meant; shown beside what an earlier training here reached"
        ),
    ] = None,
) -> None:
    """Say what would run and what it needs; run nothing."""
    from draftsmith.plan import Rates, print_plan

    print_plan(_load(config, overrides).config, Rates(tokens_per_second, train_tokens_per_second, measure))


@app.command("show-mask")
def show_mask(
    config: ConfigPath,
    overrides: Overrides = None,
    count: Annotated[int, typer.Option(min=1, help="samples per domain")] = 1,
    split: Annotated[str, typer.Option(help="train or held_out")] = "train",
    domain: Annotated[str | None, typer.Option(help="of this domain alone")] = None,
) -> None:
    """Print prepared samples with the supervised tokens coloured."""
    from draftsmith.inspect_data import print_masks

    print_masks(_load(config, overrides).config, split, count, domain)


CachePath = Annotated[
    Path, typer.Argument(metavar="PATH", help="cache folder, such as runs/demo/cache", show_default=False)
]


@app.command("cache-info")
def cache_info(path: CachePath) -> None:
    """Print what is in a cache."""
    from draftsmith.inspect_data import print_cache_info

    print_cache_info(path)


@app.command("cache-verify")
def cache_verify(path: CachePath) -> None:
    """Check every byte of a cache; name what is damaged."""
    from draftsmith.inspect_data import print_cache_damage

    print_cache_damage(path)


@app.command("cache-repair")
def cache_repair(config: ConfigPath, overrides: Overrides = None) -> None:
    """Check every byte of a config's cache, and make just the damaged shards again."""
    from draftsmith.files import is_main
    from draftsmith.run import RunFolder

    loaded = _load(config, overrides)
    _check_inputs_of_cache(loaded)
    with RunFolder(loaded.config.run).lock() if is_main() else nullcontext():
        _work(loaded).repair_cache()


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="run folder, such as runs/demo", show_default=False)],
    draft: Annotated[str, typer.Option(help="name of a trained draft of the run", show_default=False)],
    to: Annotated[str, typer.Option(help="vllm, sglang, trtllm, speculators or transformers", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="folder to write; none: RUN/export/FORMAT/DRAFT")] = None,
) -> None:
    """Write a trained draft as the folder that a serving engine loads, with the line that starts it."""
    from draftsmith.serving import export_run

    export_run(run, draft, to, out, say)


@app.command("import")
def import_(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="a published head: EAGLE, EAGLE-3, Medusa", show_default=False)
    ],
    target: Annotated[str, typer.Option(help="folder or hub name of the target that it is for", show_default=False)],
    out: Annotated[Path, typer.Option(help="folder of the imported head", show_default=False)],
    nested_ids: Annotated[
        str, typer.Option(help="what ids below eagle_config count: output or input of blocks")
    ] = "output",
) -> None:
    """Read a head that somebody else trained (SafeAILab, vLLM, speculators, SGLang), to evaluate it or train on from it."""
    from draftsmith.serving import import_head

    import_head(folder, target, out, nested_ids, say)


@app.command()
def chat(
    target: Annotated[str, typer.Option(help="folder or hub name of the target")],
    draft: Annotated[str | None, typer.Option(help="folder of a draft LM or head; none: plain decoding")] = None,
    k: Annotated[int, typer.Option("-K", "--k", min=1, help="tokens drafted per verify")] = 5,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy")] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="tokens of one answer at most")] = 200,
    seed: Annotated[int | None, typer.Option(help="makes sampled answers repeatable")] = None,
) -> None:
    """Chat at the terminal; accepted draft tokens are coloured by their depth. Ends with Ctrl-D."""
    from collections.abc import Iterator

    from rich.console import Console

    from draftsmith.chat import chat as run_chat

    console = Console()

    def lines() -> Iterator[str]:
        if not sys.stdin.isatty():
            yield from sys.stdin
            return
        while True:
            try:
                yield console.input("[bold]> [/bold]")
            except (EOFError, KeyboardInterrupt):
                return

    run_chat(target, draft, lines, console, K=k, temperature=temperature, max_new_tokens=max_new_tokens, seed=seed)
