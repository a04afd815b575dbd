"""The pictures of a report: each is one panel, drawn once in light and once in dark colours.

Knows results and training logs as plain values; knows no page, no run folder, no screen (no pyplot).
"""

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from draftsmith.eval.results import Measure, Result, by_setting, domains, names
from draftsmith.eval.theory import expected_tokens, optimal_length, speedup

ALPHAS = (0.3, 0.5, 0.7, 0.8, 0.9)
MARKED = (0.5, 0.7, 0.9)
MOST_K = 16
SIZE = (4.6, 3.4)  # inches: one panel fills a telephone's width, two or three stand side by side on a desk
# Okabe and Ito's colours, apart for every kind of colour vision; the marker says the same once more.
STYLES = {
    "untrained": ("#8a8a8a", "v"),
    "prompt-lookup": ("#009e73", "s"),
    "distilled": ("#0072b2", "o"),
    "eagle3-no-rollout": ("#e69f00", "^"),
    "eagle3": ("#d55e00", "D"),
    "oracle": ("#b06fb0", "*"),
}
OTHERS = (("#56b4e9", "P"), ("#c9b400", "X"), ("#7a68d8", "h"), ("#a0522d", "p"))
LIGHT = {"ink": "#1d2330", "grid": "#d9dde5"}
DARK = {"ink": "#dfe3ea", "grid": "#3a4150"}


@dataclass(frozen=True)
class Plot:
    """One panel: `name` is its file's stem, `png` the light picture, `light` and `dark` the same as SVG text."""

    name: str
    title: str
    png: bytes
    light: str
    dark: str


@dataclass(frozen=True)
class Curve:
    """One stage's training log: `steps[i]` belongs to `loss[i]` and, for a draft, `acceptance[i]` (else None)."""

    name: str
    steps: tuple[int, ...]
    loss: tuple[float, ...]
    acceptance: tuple[float | None, ...]


def _style(name: str, known: Sequence[str]) -> tuple[str, str]:
    if name in STYLES:
        return STYLES[name]
    unknown = [other for other in known if other not in STYLES]
    return OTHERS[unknown.index(name) % len(OTHERS)] if name in unknown else ("#8a8a8a", "o")


def _settings(colours: dict[str, str]) -> dict[str, object]:
    ink = colours["ink"]
    return {
        "font.size": 9.5,
        "axes.titlesize": 10.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.facecolor": "none",
        "axes.edgecolor": ink,
        "axes.labelcolor": ink,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": colours["grid"],
        "grid.linewidth": 0.7,
        "text.color": ink,
        "xtick.color": ink,
        "ytick.color": ink,
        "legend.frameon": False,
        "legend.fontsize": 8.5,
        "svg.hashsalt": "draftsmith",  # the same numbers give the same file
    }


def _draw(name: str, title: str, paint: Callable[[Axes], None]) -> Plot:
    """Paint one panel: as a PNG with a white ground, and as SVG text without a ground in both colour schemes."""
    with rc_context(_settings(LIGHT)):
        figure = Figure(figsize=SIZE, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.set_title(title)
        paint(axes)
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # the layout is found; each file would search for it again
        png, svg = io.BytesIO(), io.BytesIO()
        figure.savefig(png, format="png", dpi=160, facecolor="white")
        figure.savefig(svg, format="svg", facecolor="none", metadata={"Date": None})
    light = svg.getvalue().decode()
    dark = light
    for part, colour in LIGHT.items():  # drawing a second time would take as long again and differ in nothing else
        dark = dark.replace(colour, DARK[part])
    return Plot(name, title, png.getvalue(), light, dark)


def _label(setting: tuple[float, int, str]) -> str:
    temperature, K, tree = setting
    return f"T = {temperature:g}, K = {K}" + ("" if tree == "chain" else f", {tree}")


def _file(setting: tuple[float, int, str]) -> str:
    temperature, K, tree = setting
    return f"T{temperature:g}-K{K}" + (
        "" if tree == "chain" else "-" + "".join(c if c.isalnum() else "-" for c in tree)
    )


def _legend(axes: Axes, columns: int) -> None:
    """Below the panel: inside it would cover points."""
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    figure.legend(loc="outside lower center", ncols=columns, columnspacing=1.0)


def _error(measures: Sequence[Measure]) -> list[list[float]]:
    """Distances below and above each value. An interval that leaves its value out (rounding) is clipped at it."""
    return [[max(m.value - m.low, 0.0) for m in measures], [max(m.high - m.value, 0.0) for m in measures]]


def _smooth(values: Sequence[float], window: int) -> list[float]:
    """The running mean of up to `window` values: single steps scatter more than the progress between two of them."""
    return [sum(part) / len(part) for i in range(len(values)) if (part := values[max(0, i - window + 1) : i + 1])]


def training_plots(curves: Sequence[Curve]) -> list[Plot]:
    """Loss of the target, loss of the drafts, expected acceptance of the drafts; panels without a curve are missing."""
    known = [curve.name for curve in curves]

    def lines(chosen: Sequence[Curve], acceptance: bool) -> Callable[[Axes], None]:
        def paint(axes: Axes) -> None:
            for curve in chosen:
                pairs = [
                    (step, value)
                    for step, value in zip(curve.steps, curve.acceptance if acceptance else curve.loss, strict=True)
                    if value is not None and math.isfinite(value)
                ]
                steps, values = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
                window = max(1, len(values) // 20)
                color = "#0072b2" if curve.name == "target" else _style(curve.name, known)[0]
                axes.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
                axes.plot(steps, _smooth(values, window), color=color, label=curve.name, linewidth=1.8)
            axes.set_xlabel("optimiser step")
            axes.set_ylabel("expected acceptance Σ min(p, q)" if acceptance else "loss (nats per token)")
            if len(chosen) > 1:
                axes.legend()

        return paint

    target = [curve for curve in curves if curve.name == "target" and curve.steps]
    drafts = [curve for curve in curves if curve.name != "target" and curve.steps]
    accepting = [curve for curve in drafts if any(value is not None for value in curve.acceptance)]
    panels = [
        ("training-target", "Training the target", target, False),
        ("training-drafts", "Training the drafts", drafts, False),
        ("training-acceptance", "Expected acceptance in training", accepting, True),
    ]
    return [_draw(name, title, lines(chosen, by)) for name, title, chosen, by in panels if chosen]


def depth_plots(results: Sequence[Result]) -> list[Plot]:
    """α and the conditional acceptance n_alpha[k] of each draft by depth, one panel per setting and domain."""
    plots = []
    for setting, group in by_setting(list(results)):
        for domain in domains(group):
            chosen = [result for result in group if result.domain == domain and result.n_alpha]
            if chosen:
                title = f"Acceptance by depth: {domain}, {_label(setting)}"
                name = re.sub(r"[^\w.-]+", "_", domain)  # a domain is any text, and this becomes a file's name
                plots.append(_draw(f"depth-{name}-{_file(setting)}", title, _depth(chosen, setting[1])))
    return plots


def _depth(chosen: Sequence[Result], K: int) -> Callable[[Axes], None]:
    known = names(list(chosen))

    def paint(axes: Axes) -> None:
        for index, result in enumerate(chosen):
            color, marker = _style(result.draft, known)
            shift = (index - (len(chosen) - 1) / 2) * 0.07  # side by side, so that intervals stay apart
            at = [depth + 1 + shift for depth in range(len(result.n_alpha))]
            style: dict[str, Any] = {"color": color, "marker": marker, "markersize": 4.5, "elinewidth": 1, "capsize": 2}
            values = [measure.value for measure in result.n_alpha]
            axes.errorbar(at, values, yerr=_error(result.n_alpha), label=result.draft, linewidth=1.4, **style)
            if result.alpha is not None:
                axes.errorbar([shift], [result.alpha.value], yerr=_error([result.alpha]), **style)
        axes.axvline(0.5, color=axes.xaxis.label.get_color(), linewidth=0.6, linestyle=":")
        axes.set_xticks(range(K + 1), ["α", *map(str, range(1, K + 1))])
        axes.set_xlabel("α over all positions  |  n_alpha by drafted position")
        axes.set_ylim(-0.02, 1.05)
        _legend(axes, 2)

    return paint


def tokens_plots(results: Sequence[Result]) -> list[Plot]:
    """Tokens per verify of each draft by domain with 95 % intervals, one panel per setting."""
    plots = []
    for setting, group in by_setting(list(results)):
        chosen = [result for result in group if result.tokens_per_verify is not None]
        if chosen:
            title = f"Tokens per verify, {_label(setting)}"
            plots.append(_draw(f"tokens-per-verify-{_file(setting)}", title, _bars(chosen, setting[1])))
    return plots


def _bars(chosen: Sequence[Result], K: int) -> Callable[[Axes], None]:
    drafts, places = names(list(chosen)), domains(list(chosen))
    width = 0.84 / len(drafts)

    def paint(axes: Axes) -> None:
        for index, draft in enumerate(drafts):
            own = [result for result in chosen if result.draft == draft]
            measures = [result.tokens_per_verify for result in own if result.tokens_per_verify is not None]
            at = [places.index(result.domain) + (index - (len(drafts) - 1) / 2) * width for result in own]
            ink = axes.xaxis.label.get_color()
            error = {"ecolor": ink, "elinewidth": 1.0, "capsize": 1.5}
            heights = [measure.value for measure in measures]
            color = _style(draft, drafts)[0]
            axes.bar(at, heights, width * 0.92, yerr=_error(measures), color=color, label=draft, error_kw=error)
        axes.axhline(1.0, color=axes.xaxis.label.get_color(), linewidth=0.9, linestyle="--")
        axes.set_xticks(range(len(places)), places)
        axes.grid(axis="x", visible=False)
        axes.set_ylim(0, max(K + 1.2, axes.get_ylim()[1]))
        axes.set_ylabel("tokens per verify")
        _legend(axes, 2)

    return paint


def theory_plots(c: float, verify_cost: float = 1.0) -> list[Plot]:
    """Expected tokens and predicted speed-up against K for several α; the best K for α = 0.5, 0.7, 0.9 is marked.

    `c` and `verify_cost` are in plain target steps. Tokens always grow with K, so the optimum is the speed-up's.
    """
    range_K = range(MOST_K + 1)
    colours = ("#8a8a8a", "#56b4e9", "#009e73", "#e69f00", "#d55e00")

    def paint(value: Callable[[float, int], float], label: str) -> Callable[[Axes], None]:
        def inner(axes: Axes) -> None:
            for alpha, color in zip(ALPHAS, colours, strict=True):
                axes.plot(
                    range_K, [value(alpha, K) for K in range_K], color=color, label=f"α = {alpha:g}", linewidth=1.6
                )
                if alpha in MARKED:
                    best = optimal_length(alpha, c, verify_cost, most=MOST_K)
                    axes.plot(best, value(alpha, best), "o", color=color, markersize=6.5)
                    place: dict[str, Any] = {"xytext": (2, 6), "textcoords": "offset points", "fontsize": 8.5}
                    axes.annotate(f"K = {best}", (best, value(alpha, best)), color=color, **place)
            axes.set_xlabel("K, tokens drafted per verify")
            axes.set_ylabel(label)
            axes.margins(y=0.12)
            _legend(axes, 3)

        return inner

    tokens = paint(expected_tokens, r"$(1 - \alpha^{K+1})\,/\,(1 - \alpha)$")
    gain = paint(lambda alpha, K: speedup(alpha, K, c, verify_cost if K else 1.0), "tokens / (verify cost + K c)")
    return [
        _draw("expected-tokens", "Expected tokens per verify against K", tokens),
        _draw("expected-speedup", f"Predicted speed-up against K, c = {c:.2g}", gain),
    ]
