"""n_alpha as pictures: drafts by positions, one picture per domain. For trackers, whose own panels draw no interval anyway.

Knows results as plain values; the report draws the same numbers as curves with intervals (`draftsmith.eval.plots`).
"""

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes

from draftsmith.eval.figures import Plot, draw, file_stem, short
from draftsmith.eval.results import Result, by_setting, domains

MAP = "cividis"  # even in lightness, and the same for every kind of colour vision


def heat_maps(results: Sequence[Result]) -> list[Plot]:
    """One panel per domain, at the lowest temperature; no panel where no position was measured."""
    group = next((group for _, group in by_setting(list(results))), [])
    plots = []
    for domain in domains(group):
        chosen = [result for result in group if result.domain == domain and result.n_alpha]
        if chosen:
            title = f"n_alpha, {short(domain)}, {chosen[0].setting.label}"
            plots.append(draw(f"n-alpha-{file_stem(domain)}", title, _heat(chosen)))
    return plots


def _heat(chosen: Sequence[Result]) -> Callable[[Axes], None]:
    deepest = max(len(result.n_alpha) for result in chosen)

    def paint(axes: Axes) -> None:
        # A draft that proposed less than the others has no value beyond its last position: the cell stays empty.
        rows = [
            [m.value for m in result.n_alpha] + [float("nan")] * (deepest - len(result.n_alpha)) for result in chosen
        ]
        axes.pcolormesh(rows, cmap=MAP, vmin=0, vmax=1, edgecolors="white", linewidth=1)
        for y, result in enumerate(chosen):
            for x, measure in enumerate(result.n_alpha):
                ink = "white" if measure.value < 0.55 else "black"
                axes.text(x + 0.5, y + 0.5, f"{measure.value:.2f}", ha="center", va="center", color=ink)
        axes.set_xticks([k + 0.5 for k in range(deepest)], list(map(str, range(1, deepest + 1))))
        axes.set_yticks([y + 0.5 for y in range(len(chosen))], [short(result.draft) for result in chosen])
        axes.invert_yaxis()
        axes.grid(visible=False)
        axes.set_xlabel("drafted position")

    return paint
