"""How a panel of the report is drawn: once, as a picture file and as SVG that takes its colours from the page around it.

Knows colours, type and matplotlib; knows nothing of what is drawn, and no screen (no pyplot).
"""

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from draftsmith.eval.results import Measure

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
INK, GRID = "#1d2330", "#d9dde5"
#: Every colour that a panel may use, and what it is on a dark page: the same hue, as bright as it must be there.
DARK = {
    INK: "#dfe3ea",
    GRID: "#343c4b",
    "#8a8a8a": "#a9adb5",
    "#009e73": "#35c79d",
    "#0072b2": "#4aa3df",
    "#e69f00": "#f0b63c",
    "#d55e00": "#ff8b4a",
    "#b06fb0": "#d6a0d6",
    "#56b4e9": "#a8daf7",
    "#c9b400": "#e3d246",
    "#7a68d8": "#a497f2",
    "#a0522d": "#cf8a66",
}


@dataclass(frozen=True)
class Plot:
    """One panel: `name` is its file's stem, `png` the picture on white, `svg` an element for an HTML page.

    The colours of `svg` are the page's variables (see `variables`), its type is the page's own.
    """

    name: str
    title: str
    png: bytes
    svg: str


def style(name: str, known: Sequence[str]) -> tuple[str, str]:
    """Colour and marker of a draft; those that have none of their own share `OTHERS` in the order of `known`."""
    if name in STYLES:
        return STYLES[name]
    unknown = [other for other in known if other not in STYLES]
    return OTHERS[unknown.index(name) % len(OTHERS)] if name in unknown else ("#8a8a8a", "o")


def variables(dark: bool) -> str:
    """CSS declarations of every colour that `Plot.svg` names."""
    return " ".join(f"--c{light[1:]}: {shade if dark else light};" for light, shade in DARK.items())


def _settings() -> dict[str, object]:
    return {
        "font.size": 10,
        "axes.titlesize": 10.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.titlepad": 9,
        "axes.facecolor": "none",
        "axes.edgecolor": INK,
        "axes.labelcolor": INK,
        "axes.linewidth": 0.7,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": GRID,
        "grid.linewidth": 0.6,
        "text.color": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "legend.frameon": False,
        "legend.fontsize": 9,
        "svg.hashsalt": "draftsmith",  # the same numbers give the same file
        "svg.fonttype": "none",
        "text.parse_math": False,  # a domain called "a$b" is no formula
    }


def draw(name: str, title: str, paint: Callable[[Axes], None]) -> Plot:
    """Paint one panel, once for both of its forms."""
    with rc_context(_settings()):
        figure = Figure(figsize=SIZE, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.set_title(short(title, 52))
        paint(axes)
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # the layout is found; each file would search for it again
        png, svg = io.BytesIO(), io.BytesIO()
        figure.savefig(png, format="png", dpi=160, facecolor="white")
        figure.savefig(svg, format="svg", facecolor="none", metadata={"Date": None})
    return Plot(name, title, png.getvalue(), _inline(svg.getvalue().decode(), name))


def _inline(svg: str, name: str) -> str:
    """matplotlib's SVG file as an element of a page: its colours by name, its ids its own, its type the page's."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r' (?:width|height)="[\d.]+pt"', "", svg, count=2)
    svg = re.sub(r'(\bid="|url\(#|href="#)', lambda found: f"{found[0]}{_identifier(name)}-", svg)
    svg = re.sub(r"font: (?:(\d+) )?([\d.]+)px [^;\"]*", r"font-size: \2px; font-weight: \1", svg)
    svg = re.sub(r"font-weight: (?=[;\"])", "font-weight: 400", svg)
    for colour in DARK:
        svg = svg.replace(colour, f"var(--c{colour[1:]})")
    return re.sub(r">\s+<", "><", svg.replace("<svg", '<svg aria-hidden="true"', 1))


def _identifier(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)


def file_stem(text: str) -> str:
    """A domain or draft as part of a file's name: it may be any text."""
    return re.sub(r"[^\w.-]+", "_", text)


def short(text: str, most: int = 24) -> str:
    """What of a name fits a panel: matplotlib would give a long one all the room there is."""
    return text if len(text) <= most else text[: most - 1] + "…"


def legend(axes: Axes, columns: int) -> None:
    """Below the panel: inside it would cover points."""
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    handles, labels = axes.get_legend_handles_labels()
    named = [short(label) for label in labels]
    figure.legend(handles, named, loc="outside lower center", ncols=columns, columnspacing=1.0)


def error(measures: Sequence[Measure]) -> list[list[float]]:
    """Distances below and above each value. An interval that leaves its value out (rounding) is clipped at it."""
    return [[max(m.value - m.low, 0.0) for m in measures], [max(m.high - m.value, 0.0) for m in measures]]
