"""`draftsmith theory`: the textbook's numbers for a drafted chain, as a table and a picture. Numbers only, see `eval.theory`."""

from collections.abc import Callable, Sequence
from pathlib import Path

from draftsmith.errors import UserError
from draftsmith.eval.theory import expected_tokens, optimal_length, speedup

PLOTS = (".svg", ".png", ".pdf")
FURTHEST = 1000  # an optimum is sought among chains up to this long


def print_theory(
    alphas: Sequence[float], c: float, verify_cost: float, most: int, plot: Path | None, say: Callable[[str], None]
) -> None:
    """E[tokens] and speed-up for K = 0 … `most`, the optimum marked; a picture at `plot`. Raises UserError."""
    for alpha in alphas:
        if not 0 <= alpha <= 1:
            raise UserError(f"--alpha {alpha:g}: is a probability; give a number from 0 to 1")
    if not 0 < verify_cost < float("inf") or not 0 <= c < float("inf"):
        raise UserError(
            f"--verify-cost {verify_cost:g}, --draft-cost {c:g}: a verify costs more than 0, a draft step 0 or more"
        )
    if plot is not None and plot.suffix.lower() not in PLOTS:
        raise UserError(f"--plot {plot}: ends in {', '.join(PLOTS)}")
    from rich.console import Console
    from rich.table import Table

    best = {alpha: optimal_length(alpha, c, verify_cost, FURTHEST) for alpha in alphas}
    table = Table(title=f"draft cost {c:g}, verify cost {verify_cost:g} (in plain target steps)", title_justify="left")
    table.add_column("K", justify="right")
    for alpha in alphas:
        table.add_column(f"tokens, α {alpha:g}", justify="right")
        table.add_column("speed-up", justify="right")
    for K in range(most + 1):
        cells = [str(K)]
        for alpha in alphas:
            gain = speedup(alpha, K, c, verify_cost if K else 1.0)
            shown = f"{gain:.2f}"
            cells += [f"{expected_tokens(alpha, K):.2f}", f"[bold]{shown} *[/bold]" if best[alpha] == K else shown]
        table.add_row(*cells)
    Console(width=None if Console().is_terminal else 120).print(table)
    for alpha in alphas:
        say(_optimum(alpha, best[alpha], c, verify_cost))
    if plot is not None:
        _draw(alphas, c, verify_cost, most, plot)
        say(f"plot: {plot}")


def _optimum(alpha: float, K: int, c: float, verify_cost: float) -> str:
    if K == 0:
        return f"α {alpha:g}: do not draft, nothing beats plain decoding"
    gain = speedup(alpha, K, c, verify_cost)
    if K == FURTHEST:
        return f"α {alpha:g}: the longer the better, {gain:.2f}× at K = {K}"
    return f"α {alpha:g}: best K = {K}, {expected_tokens(alpha, K):.2f} tokens per verify, {gain:.2f}×"


def _draw(alphas: Sequence[float], c: float, verify_cost: float, most: int, path: Path) -> None:
    """Speed-up against K, one line per α, the optimum marked."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    lengths = range(most + 1)
    for alpha in alphas:
        gains = [speedup(alpha, K, c, verify_cost if K else 1.0) for K in lengths]
        [line] = axes.plot(lengths, gains, marker=".", label=f"α = {alpha:g}")
        best = optimal_length(alpha, c, verify_cost, most)
        axes.plot(best, gains[best], marker="o", color=line.get_color(), markersize=9, fillstyle="none")
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set(xlabel="K, tokens drafted per verify", ylabel="speed-up over plain decoding")
    axes.set_title(f"draft cost {c:g}, verify cost {verify_cost:g}; circles: the best K")
    axes.legend()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    except OSError as error:
        raise UserError(f"--plot {path}: cannot be written ({error.strerror}); give another path") from error
