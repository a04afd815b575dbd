"""One self-contained page about a run: `report.html`, and its pictures as `plots/*.png`.

Reads only files of the run folder (`eval/*.json`, `*/training.jsonl`, `resolved.yaml`, `environment.json`) and needs
neither the models nor the cache. The page loads nothing from anywhere and needs no script. The verdict stands in its
first line, and a draft that makes decoding slower is called that before anything else is said about it.
"""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from rich.table import Table

from draftsmith.errors import UserError
from draftsmith.eval.figures import Plot, variables
from draftsmith.eval.plots import (
    Curve,
    calibration_plots,
    depth_plots,
    length_plots,
    sweep_plots,
    theory_plots,
    tokens_plots,
    training_plots,
)
from draftsmith.eval.results import Measure, Result, Sample, by_setting, domains, headline, load_results
from draftsmith.eval.theory import expected_tokens
from draftsmith.eval.verdict import exactness, hot_notes, sweep, verdict
from draftsmith.files import publish, publish_text
from draftsmith.settings import flat

DEFAULT_COST = 0.05  # of one draft step in target steps, where no result holds a measured one
DEEPEST = 6  # depths beyond share its colour
LARGEST = 1e15  # what a training log may hold; plots fail beyond any such number
TRAINED = ("target", "draft", "eagle/*")  # folders with a training.jsonl


def _number(measure: Measure | None, digits: int, unit: str = "") -> str:
    return "–" if measure is None else f"{measure.value:.{digits}f}{unit}"


def _interval(measure: Measure | None, digits: int) -> str:
    return "" if measure is None or measure.count == 0 else f"{measure.low:.{digits}f}–{measure.high:.{digits}f}"


def row(result: Result) -> dict[str, str]:
    """The cells of one result as text; a `…_interval` beside each measured number."""
    alpha, tokens, first = result.alpha, result.tokens_per_verify, next(iter(result.n_alpha), None)
    return {
        "draft": result.draft,
        "alpha": _number(alpha, 3),
        "alpha_interval": _interval(alpha, 3),
        "first": _number(first, 3),
        "first_interval": _interval(first, 3),
        "tokens": _number(tokens, 2),
        "tokens_interval": _interval(tokens, 2),
        "iid": "–" if alpha is None else f"{expected_tokens(min(max(alpha.value, 0.0), 1.0), result.K):.2f}",
        "speedup": _number(result.speedup, 2, "×"),
        "speedup_interval": _interval(result.speedup, 2),
        "identical": "–" if result.identical is None else f"{result.identical[0]}/{result.identical[1]}",
        "broken": "yes" if result.identical is not None and result.identical[0] < result.identical[1] else "",
        "verifies": f"{result.verifies:,}",
    }


def console_tables(results: list[Result]) -> list[Table]:
    """The result as one table per setting for a terminal; intervals are 95 %."""
    tables = []
    for setting, group in by_setting(results):
        table = Table(title=setting.label, title_justify="left", title_style="bold")
        for heading in ("domain", "draft"):
            table.add_column(heading)
        for heading in ("alpha", "tokens/verify", "95 %", "iid", "speedup", "identical"):
            table.add_column(heading, justify="right", no_wrap=True)
        for domain in domains(group):
            own = [row(result) for result in group if result.domain == domain]
            for index, cells in enumerate(own):
                values = [cells[key] for key in ("alpha", "tokens", "tokens_interval", "iid", "speedup", "identical")]
                last = index == len(own) - 1
                table.add_row(domain if index == 0 else "", cells["draft"], *values, end_section=last)
        tables.append(table)
    return tables


def load_curves(run: Path) -> list[Curve]:
    """The training logs below `run`, named by their folder. A half-written last line is left out."""
    curves = []
    for pattern in TRAINED:
        for path in sorted(run.glob(f"{pattern}/training.jsonl")):
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
            steps = [entry for line in lines if (entry := _entry(line)) is not None]
            acceptance = tuple(entry.get("expected_acceptance") for entry in steps)
            at, loss = tuple(int(e["step"]) for e in steps), tuple(float(e["loss"]) for e in steps)
            name = "distilled" if pattern == "draft" else path.parent.name
            curves.append(Curve(name, at, loss, acceptance))
    return curves


def _entry(line: str) -> dict[str, Any] | None:
    """A logged step with finite numbers; None for any other line."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or not all(_is_number(entry.get(name)) for name in ("step", "loss")):
        return None
    return entry if _is_number(entry.get("expected_acceptance", 0)) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < LARGEST


@dataclass(frozen=True)
class Section:
    """A heading, a sentence that says how to read what is below it, and its panels."""

    title: str
    note: str
    plots: list[Plot]


def _sections(run: Path, results: list[Result]) -> list[Section]:
    best = headline(results)
    costs = [result.draft_cost.value for result in best if result.draft_cost is not None]
    cost = sum(costs) / len(costs) if costs else DEFAULT_COST
    sections = [
        Section(
            "Tokens per verify",
            "The dashed line is plain decoding, one token per forward pass of the target.",
            tokens_plots(results),
        ),
        Section(
            "Acceptance by depth",
            "Left of the dotted line α, over all drafted positions reached; right of it n_alpha, the share of drafted tokens "
            "accepted at each position among those that were reached.",
            depth_plots(results),
        ),
        Section(
            "How far to draft",
            "Dashed is what the textbook expects of α if every depth were alike and independent; marks are measured. Tokens for "
            "less than the K that was decoded are those of the same verifies, cut there.",
            length_plots(best),
        ),
        Section(
            "How sure the head is",
            "On the dotted line a head that says 0.7 is right in 70 of 100 drafted tokens.",
            calibration_plots(results),
        ),
        Section(
            "Training",
            "Faint: single steps; strong: their running mean. Losses of different kinds are not comparable.",
            training_plots(load_curves(run)),
        ),
        Section(
            "Theory",
            f"For any α, at the {'measured' if costs else 'assumed'} cost c = {cost:.2g} of a draft step in plain target steps; "
            "the marked K is the fastest.",
            theory_plots(cost),
        ),
    ]
    return [section for section in sections if section.plots]


def _write(content: bytes, path: Path) -> None:
    path.write_bytes(content)


@dataclass(frozen=True)
class Text:
    """A sample for the page: its caption, the end of its prompt, and (text, depth class) of each token."""

    caption: str
    prompt: str
    pieces: list[tuple[str, int]]
    deepest: int


def _texts(results: list[Result]) -> list[Text]:
    """The headline draft's sample of each domain."""
    return [_text(result, result.sample) for result in headline(results) if result.sample is not None]


def _text(result: Result, sample: Sample) -> Text:
    count = len(sample.pieces)
    own = sum(depth == 0 for _, depth in sample.pieces)
    deepest = max((depth for _, depth in sample.pieces), default=0)
    caption = f"{result.domain}, {result.setting.label}: {count - own} of {count} tokens were drafted by {result.draft}"
    # A line break has no ink of its own: the mark shows which token it was.
    pieces = [(text.replace("\n", "↵\n"), depth) for text, depth in sample.pieces]
    return Text(caption, sample.prompt, pieces, deepest)


def _optional(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _machine(path: Path) -> list[tuple[str, str]]:
    try:
        return _facts(json.loads(text)) if (text := _optional(path)) else []
    except (OSError, ValueError, AttributeError, RecursionError) as problem:
        raise UserError(f"{path}: not readable; remove it, any stage of the run writes it again") from problem


def _facts(environment: dict[str, Any]) -> list[tuple[str, str]]:
    """Nested values as flat (name, text) pairs in their order."""
    return [
        (name, ", ".join(map(str, value)) if isinstance(value, list) else str(value))
        for name, value in flat(environment, " ").items()
    ]


def build_report(run: Path) -> Path:
    """Write `run`/report.html and `run`/plots/*.png from the files of `run`; returns the page's path.

    Raises UserError when the folder is missing or no draft has been measured in it.
    """
    if not run.is_dir():
        raise UserError(f"{run}: no such run folder; give the folder that holds resolved.yaml, such as runs/demo")
    results = load_results(run)
    if not results:
        raise UserError(f"{run / 'eval'}: no result to report; run `draftsmith eval-acceptance CONFIG` first")
    sections, heat = _sections(run, results), _heat_plots(results)
    for stale in (run / "plots").glob("*.png"):
        stale.unlink()
    for plot in [*heat, *(plot for section in sections for plot in section.plots)]:
        publish(run / "plots" / f"{plot.name}.png", functools.partial(_write, plot.png))
    page = run / "report.html"
    publish_text(page, _render(run, results, sections, heat))
    return page


def _heat_plots(results: list[Result]) -> list[Plot]:
    best = headline(results)
    return sweep_plots(results, best[0].draft) if best else []


def _tables(results: list[Result]) -> list[dict[str, Any]]:
    return [
        {
            "title": setting.label,
            "domains": [(name, [row(r) for r in group if r.domain == name]) for name in domains(group)],
        }
        for setting, group in by_setting(results)
    ]


def _inline(plots: list[Plot]) -> list[tuple[str, Markup]]:
    """Titles, and SVG that is safe as it stands: matplotlib escapes every text in it."""
    return [(plot.title, Markup(plot.svg)) for plot in plots]


def _render(run: Path, results: list[Result], sections: list[Section], heat: list[Plot]) -> str:
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    resolved = _optional(run / "resolved.yaml")
    best, texts = headline(results), _texts(results)
    return environment.get_template("report.html.jinja").render(
        name=run.resolve().name,
        verdict=verdict(results),
        exactness=(exact := exactness(results)),
        broken=any(same < compared for _, same, compared in exact),
        tables=(tables := _tables(results))[:1],
        more=tables[1:],
        prompts=max(result.prompts for result in results),
        best=best[0].draft if best else None,
        tiles=[row(result) | {"domain": result.domain} for result in best],
        texts=texts,
        deepest=min(max((text.deepest for text in texts), default=0), DEEPEST),
        heats=(heats := sweep(results)),
        hot=hot_notes(heats),
        heat_plots=_inline(heat),
        sections=[(section.title, section.note, _inline(section.plots)) for section in sections],
        colours={"light": Markup(variables(dark=False)), "dark": Markup(variables(dark=True))},
        settings=resolved,
        seed=(yaml.safe_load(resolved) or {}).get("seed"),
        machine=_machine(run / "environment.json"),
    )
