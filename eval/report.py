"""One self-contained page about a run: `report.html`, and its pictures as `plots/*.png`.

Reads only files of the run folder (`eval/*.json`, `*/training.jsonl`, `resolved.yaml`, `environment.json`) and needs
neither the models nor the cache. The page loads nothing from anywhere and needs no script. The verdict stands in its
first line, and a draft that makes decoding slower is called that before anything else is said about it.
"""

import base64
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
from draftsmith.eval.plots import Curve, Plot, depth_plots, theory_plots, tokens_plots, training_plots
from draftsmith.eval.results import Measure, Result, by_setting, domains, headline, load_results, names
from draftsmith.eval.theory import expected_tokens
from draftsmith.files import publish, publish_text
from draftsmith.settings import flat

DEFAULT_COST = 0.05  # of one draft step in target steps, where no result holds a measured one
LARGEST = 1e15  # what a training log may hold; plots fail beyond any such number
TRAINED = ("target", "draft", "eagle/*")  # folders with a training.jsonl


@dataclass(frozen=True)
class Verdict:
    """The first line of a report, and how it is meant: "inexact", "faster", "slower" or "unmeasured"."""

    tone: str
    text: str


def _range(measures: list[Measure], digits: int) -> str:
    low, high = (f"{bound(m.value for m in measures):.{digits}f}" for bound in (min, max))
    return low if low == high else f"{low} to {high}"


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def verdict(results: list[Result]) -> Verdict:
    """What the run's best draft is worth, from the measured numbers alone.

    A greedy output that differs from plain decoding, of any draft, is said before all else: such a speed is worth nothing.
    "Faster" is said only where every measured speed-up has its whole interval above 1; one below 1 is said first.
    """
    worth = _worth(results)
    wrong = [(draft, of - same, of) for draft, same, of in exactness(results) if same < of]
    if not wrong:
        return worth
    parts = [
        f"{draft}{'' if i else ' differs from plain decoding'} on {count} of {of}{'' if i else ' prompts'}"
        for i, (draft, count, of) in enumerate(wrong)
    ]
    return Verdict("inexact", f"NOT EXACT: {_listed(parts)}. {worth.text}")


def _worth(results: list[Result]) -> Verdict:
    chosen = headline(results)
    if not chosen:
        return Verdict("unmeasured", "No draft of this run has been measured yet: run eval-acceptance.")
    draft, temperature, K = chosen[0].draft, chosen[0].temperature, chosen[0].K
    measured = [(r.domain, r.tokens_per_verify) for r in chosen if r.tokens_per_verify is not None]
    tokens = [f"{m.value:.2f}{'' if i else ' tokens per verify'} on {domain}" for i, (domain, m) in enumerate(measured)]
    emits = f"{draft} emits {_listed(tokens)} at T = {temperature:g}, K = {K}"
    same = [r for r in results if (r.draft, r.K, r.tree) == (draft, K, chosen[0].tree)]
    several = len({r.temperature for r in same if r.speedup is not None}) > 1
    timed = [
        (f"{r.domain} at T = {r.temperature:g}" if several else r.domain, r.speedup)
        for r in same
        if r.speedup is not None
    ]
    if not timed:
        return Verdict("unmeasured", f"{emits}; its speed against plain decoding was not measured.")
    slower = [(domain, gain) for domain, gain in timed if gain.value < 1.0]
    if slower:
        where = "" if len(slower) == len(timed) else " on " + _listed([domain for domain, _ in slower])
        factor = _range([gain for _, gain in slower], 2)
        return Verdict("slower", f"Slower than plain decoding{where}: {factor}× its speed. {emits}.")
    factor = _range([gain for _, gain in timed], 2)
    if any(gain.low <= 1.0 for _, gain in timed):
        return Verdict(
            "unmeasured",
            f"Not clearly faster than plain decoding: {factor}× its speed, interval down to 1 or below. {emits}.",
        )
    return Verdict("faster", f"{emits}: {factor}× the speed of plain decoding.")


def exactness(results: list[Result]) -> list[tuple[str, int, int]]:
    """(draft, identical, compared): greedy outputs that equal plain greedy decoding, summed over domains and K."""
    counts = []
    for draft in names(results):
        pairs = [r.identical for r in results if r.draft == draft and r.identical is not None and r.temperature == 0.0]
        if pairs:
            counts.append((draft, sum(same for same, _ in pairs), sum(of for _, of in pairs)))
    return counts


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
    for (temperature, K, tree), group in by_setting(results):
        table = Table(title=f"T = {temperature:g}, K = {K}, {tree}", title_justify="left", title_style="bold")
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


def _plots(run: Path, results: list[Result]) -> list[tuple[str, list[Plot]]]:
    costs = [result.draft_cost.value for result in headline(results) if result.draft_cost is not None]
    measured = sum(costs) / len(costs) if costs else DEFAULT_COST
    groups = [
        ("Tokens per verify", tokens_plots(results)),
        ("Acceptance by depth", depth_plots(results)),
        ("Training", training_plots(load_curves(run))),
        ("What theory expects", theory_plots(measured)),
    ]
    return [(title, plots) for title, plots in groups if plots]


def _write(content: bytes, path: Path) -> None:
    path.write_bytes(content)


def _uri(svg: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


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
    groups = _plots(run, results)
    for stale in (run / "plots").glob("*.png"):
        stale.unlink()
    for _, plots in groups:
        for plot in plots:
            publish(run / "plots" / f"{plot.name}.png", functools.partial(_write, plot.png))
    page = run / "report.html"
    publish_text(page, _render(run, results, groups))
    return page


def _render(run: Path, results: list[Result], groups: list[tuple[str, list[Plot]]]) -> str:
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    tables = [
        {
            "title": f"T = {temperature:g}, K = {K}, {tree}",
            "domains": [(name, [row(r) for r in group if r.domain == name]) for name in domains(group)],
        }
        for (temperature, K, tree), group in by_setting(results)
    ]
    resolved = _optional(run / "resolved.yaml")
    return environment.get_template("report.html.jinja").render(
        name=run.resolve().name,
        verdict=verdict(results),
        exactness=(exact := exactness(results)),
        broken=any(same < compared for _, same, compared in exact),
        tables=tables,
        prompts=max(result.prompts for result in results),
        groups=[
            (title, [(p.title, Markup(_uri(p.light)), Markup(_uri(p.dark))) for p in plots]) for title, plots in groups
        ],
        settings=resolved,
        seed=(yaml.safe_load(resolved) or {}).get("seed"),
        machine=_machine(run / "environment.json"),
    )
