"""The panels of a report: which numbers stand against which.

Knows results and training logs as plain values; knows no page and no run folder. How a panel is drawn says
`draftsmith.eval.figures`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes

from draftsmith.eval.figures import INK, Plot, draw, error, file_stem, legend, short, style
from draftsmith.eval.results import Measure, Result, Setting, by_setting, domains, names
from draftsmith.eval.theory import expected_tokens, optimal_length, speedup

ALPHAS = (0.3, 0.5, 0.7, 0.8, 0.9)
MARKED = (0.5, 0.7, 0.9)
MOST_K = 16
# Of domains where each is a line. The third pair of colours is apart by lightness too.
PLACES = (("#0072b2", "o"), ("#e69f00", "^"), ("#009e73", "s"), ("#b06fb0", "*"), ("#8a8a8a", "v"), ("#d55e00", "D"))


@dataclass(frozen=True)
class Curve:
    """One stage's training log: `steps[i]` belongs to `loss[i]` and, for a draft, `acceptance[i]` (else None)."""

    name: str
    steps: tuple[int, ...]
    loss: tuple[float, ...]
    acceptance: tuple[float | None, ...]


def _file(setting: Setting) -> str:
    tree = "" if setting.tree == "chain" else "-" + "".join(c if c.isalnum() else "-" for c in setting.tree)
    greedy = "-greedy" if setting.temperature > 0 and setting.drafting == "greedy" else ""
    return f"T{setting.temperature:g}-K{setting.K}{tree}{greedy}"


def extremes(results: Sequence[Result]) -> list[tuple[Setting, list[Result]]]:
    """The groups of the lowest and of the highest temperature, each drafted in its usual way: what lies between is a curve."""
    groups = list(by_setting(list(results)))
    ends = {groups[0][0].temperature, groups[-1][0].temperature} if groups else set()
    usual = {(s.temperature, s.K, s.tree): s for s, _ in reversed(groups)}.values()
    return [(setting, group) for setting, group in groups if setting in usual and setting.temperature in ends]


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
                color = "#0072b2" if curve.name == "target" else style(curve.name, known)[0]
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
    return [draw(name, title, lines(chosen, by)) for name, title, chosen, by in panels if chosen]


def depth_plots(results: Sequence[Result]) -> list[Plot]:
    """α and the conditional acceptance n_alpha[k] of each draft by depth, one panel per domain at either end of temperature."""
    plots = []
    for setting, group in extremes(results):
        for domain in domains(group):
            chosen = [result for result in group if result.domain == domain and result.n_alpha]
            if chosen:
                name = f"depth-{file_stem(domain)}-{_file(setting)}"
                plots.append(draw(name, f"{short(domain)}, {setting.label}", _depth(chosen, setting.K)))
    return plots


def _depth(chosen: Sequence[Result], K: int) -> Callable[[Axes], None]:
    known = names(list(chosen))

    def paint(axes: Axes) -> None:
        for index, result in enumerate(chosen):
            color, marker = style(result.draft, known)
            shift = (index - (len(chosen) - 1) / 2) * 0.07  # side by side, so that intervals stay apart
            at = [depth + 1 + shift for depth in range(len(result.n_alpha))]
            look: dict[str, Any] = {"color": color, "marker": marker, "markersize": 4.5, "elinewidth": 1, "capsize": 2}
            values = [measure.value for measure in result.n_alpha]
            axes.errorbar(at, values, yerr=error(result.n_alpha), label=result.draft, linewidth=1.4, **look)
            if result.alpha is not None:
                axes.errorbar([shift], [result.alpha.value], yerr=error([result.alpha]), **look)
        axes.axvline(0.5, color=INK, linewidth=0.6, linestyle=":")
        axes.set_xticks(range(K + 1), ["α", *map(str, range(1, K + 1))])
        axes.set_xlabel("α over all positions  |  n_alpha by drafted position")
        axes.set_ylim(-0.02, 1.05)
        legend(axes, 2)

    return paint


def tokens_plots(results: Sequence[Result]) -> list[Plot]:
    """Tokens per verify of each draft by domain with 95 % intervals, one panel at either end of temperature."""
    plots = []
    for setting, group in extremes(results):
        chosen = [result for result in group if result.tokens_per_verify is not None]
        if chosen:
            plots.append(draw(f"tokens-per-verify-{_file(setting)}", setting.label, _bars(chosen, setting.K)))
    return plots


def _bars(chosen: Sequence[Result], K: int) -> Callable[[Axes], None]:
    drafts, places = names(list(chosen)), domains(list(chosen))
    width = 0.84 / len(drafts)

    def paint(axes: Axes) -> None:
        for index, draft in enumerate(drafts):
            own = [result for result in chosen if result.draft == draft]
            measures = [result.tokens_per_verify for result in own if result.tokens_per_verify is not None]
            at = [places.index(result.domain) + (index - (len(drafts) - 1) / 2) * width for result in own]
            look = {"ecolor": INK, "elinewidth": 1.0, "capsize": 1.5}
            heights = [measure.value for measure in measures]
            color = style(draft, drafts)[0]
            axes.bar(at, heights, width * 0.92, yerr=error(measures), color=color, label=draft, error_kw=look)
        axes.axhline(1.0, color=INK, linewidth=0.9, linestyle="--")
        axes.set_xticks(range(len(places)), [short(place, 14) for place in places])
        axes.grid(axis="x", visible=False)
        axes.set_ylim(0, max(K + 1.2, axes.get_ylim()[1]))
        axes.set_ylabel("tokens per verify")
        legend(axes, 2)

    return paint


def sweep_plots(results: Sequence[Result], draft: str) -> list[Plot]:
    """α, tokens per verify and speed-up of one draft against temperature; a line per domain and way of drafting.

    Empty below two temperatures. The tree and K are those of most of the draft's results.
    """
    own = [result for result in results if result.draft == draft]
    shapes = [(result.K, result.tree) for result in own]
    own = [result for result in own if (result.K, result.tree) == max(shapes, key=shapes.count)]
    if len({result.temperature for result in own}) < 2:
        return []
    panels: list[tuple[str, str, Callable[[Result], Measure | None], float | None]] = [
        ("alpha", "α", lambda result: result.alpha, None),
        ("tokens", "tokens per verify", lambda result: result.tokens_per_verify, 1.0),
        ("speedup", "speed over plain decoding", lambda result: result.speedup, 1.0),
    ]
    return [
        draw(f"temperature-{name}", f"{draft}: {label}", _sweep(own, value, label, even))
        for name, label, value, even in panels
        if any(value(result) is not None for result in own)
    ]


def _sweep(
    own: Sequence[Result], value: Callable[[Result], Measure | None], label: str, even: float | None
) -> Callable[[Axes], None]:
    """A painter. `even`: where a line marks that nothing is gained."""
    both = len({result.drafting for result in own if result.temperature > 0}) > 1

    def paint(axes: Axes) -> None:
        for index, domain in enumerate(domains(list(own))):
            color, marker = PLACES[index % len(PLACES)]
            for drafting in ("sampled", "greedy"):
                # At T = 0 there is one way to draft: both lines begin there.
                points = sorted(
                    (result.temperature, measure)
                    for result in own
                    if result.domain == domain
                    and (result.drafting == drafting or result.temperature == 0)
                    and (measure := value(result)) is not None
                )
                if not any(temperature > 0 for temperature, _ in points):
                    continue
                dashed, hollow = ("--", "none") if drafting == "greedy" else ("-", color)
                named = domain + (f", {drafting}" if both else "")
                look: dict[str, Any] = {
                    "color": color,
                    "linestyle": dashed,
                    "marker": marker,
                    "markerfacecolor": hollow,
                }
                values = [measure for _, measure in points]
                axes.errorbar(
                    [temperature for temperature, _ in points],
                    [measure.value for measure in values],
                    yerr=error(values), label=named, markersize=5, elinewidth=0.8, capsize=2, linewidth=1.5, **look,
                )  # fmt: skip
        if even is not None:
            axes.axhline(even, color=INK, linewidth=0.9, linestyle=":")
        axes.set_xlabel("temperature")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
        legend(axes, 2)

    return paint


def length_plots(chosen: Sequence[Result]) -> list[Plot]:
    """Tokens per verify and speed-up against K of one draft: the textbook's curve of each domain's α, and what was measured.

    chosen: results of one draft at one temperature. Fewer than K tokens are read off `survival`: 1 + Σ survival[k] is what the
    same verifies would have emitted, had drafting stopped there. The curve of the speed-up needs the measured costs.
    """
    chosen = [result for result in chosen if result.alpha is not None and result.tree == "chain"]
    timed = [result for result in chosen if result.speedup is not None and result.draft_cost is not None]
    plots = []
    if any(result.survival for result in chosen):
        plots.append(draw("length-tokens", f"{chosen[0].draft}: tokens per verify against K", _lengths(chosen)))
    if timed:
        plots.append(draw("length-speedup", f"{timed[0].draft}: speed-up against K", _speeds(timed)))
    return plots


def _alpha(result: Result) -> float:
    assert result.alpha is not None
    return min(max(result.alpha.value, 0.0), 1.0)


def _lengths(chosen: Sequence[Result]) -> Callable[[Axes], None]:
    def paint(axes: Axes) -> None:
        for index, result in enumerate(chosen):
            color, marker = PLACES[index % len(PLACES)]
            range_K = range(result.K + 1)
            axes.plot(range_K, [expected_tokens(_alpha(result), K) for K in range_K], "--", color=color, linewidth=1)
            survival = [measure.value for measure in result.survival]
            cut = [1 + sum(survival[:K]) for K in range(len(survival) + 1)]
            axes.plot(
                range(len(cut)), cut, marker=marker, color=color, label=result.domain, linewidth=1.5, markersize=5
            )
            if (whole := result.tokens_per_verify) is not None:
                axes.errorbar([result.K], [whole.value], yerr=error([whole]), color=color, capsize=3, elinewidth=1)
        axes.plot([], [], "--", color=INK, linewidth=1, label="if alike at every depth")
        axes.set_xlabel("K, tokens drafted per verify")
        axes.set_ylabel("tokens per verify")
        axes.set_ylim(bottom=0)
        legend(axes, 2)

    return paint


def _speeds(timed: Sequence[Result]) -> Callable[[Axes], None]:
    def paint(axes: Axes) -> None:
        longest = max(8, *(result.K + 2 for result in timed))
        for index, domain in enumerate(domains(list(timed))):
            color, marker = PLACES[index % len(PLACES)]
            own = [result for result in timed if result.domain == domain]
            first = own[0]
            assert first.draft_cost is not None
            c, verify = first.draft_cost.value, first.verify_cost.value if first.verify_cost is not None else 1.0
            expected = [speedup(_alpha(first), K, c, verify if K else 1.0) for K in range(longest + 1)]
            axes.plot(range(longest + 1), expected, "--", color=color, linewidth=1)
            gains = [result.speedup for result in own if result.speedup is not None]
            look: dict[str, Any] = {
                "color": color,
                "marker": marker,
                "capsize": 3,
                "linestyle": "none",
                "markersize": 6,
            }
            axes.errorbar(
                [result.K for result in own], [gain.value for gain in gains], yerr=error(gains), label=domain, **look
            )
        axes.axhline(1.0, color=INK, linewidth=0.9, linestyle=":")
        axes.plot([], [], "--", color=INK, linewidth=1, label="predicted from α and costs")
        axes.set_xlabel("K, tokens drafted per verify")
        axes.set_ylabel("speed over plain decoding")
        axes.set_ylim(bottom=0)
        legend(axes, 2)

    return paint


def calibration_plots(results: Sequence[Result]) -> list[Plot]:
    """How sure each head was against what was accepted, one panel per draft that says how sure it is."""
    plots = []
    for draft in names(list(results)):
        own = [result for result in results if result.draft == draft and result.calibration]
        if own:
            plots.append(draw(f"calibration-{file_stem(draft)}", f"{draft}: confidence", _calibration(own)))
    return plots


def _calibration(own: Sequence[Result]) -> Callable[[Axes], None]:
    def paint(axes: Axes) -> None:
        axes.plot([0, 1], [0, 1], ":", color=INK, linewidth=1)
        coldest = min(result.temperature for result in own)
        for index, result in enumerate(result for result in own if result.temperature == coldest):
            color, marker = PLACES[index % len(PLACES)]
            accepted = [item.accepted for item in result.calibration]
            axes.errorbar(
                [item.confidence for item in result.calibration], [measure.value for measure in accepted],
                yerr=error(accepted), color=color, marker=marker, label=result.domain, markersize=5, capsize=2, linewidth=1.3,
            )  # fmt: skip
        axes.set_xlabel(f"the head's confidence, T = {coldest:g}")
        axes.set_ylabel("accepted")
        axes.set_xlim(-0.02, 1.02)
        axes.set_ylim(-0.02, 1.05)
        legend(axes, 3)

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
            legend(axes, 3)

        return inner

    tokens = paint(expected_tokens, "tokens per verify")
    gain = paint(lambda alpha, K: speedup(alpha, K, c, verify_cost if K else 1.0), "speed over plain decoding")
    return [
        draw("expected-tokens", "What theory expects: tokens", tokens),
        draw("expected-speedup", f"What theory expects: speed at c = {c:.2g}", gain),
    ]
