"""One progress display for all long stages: a bar with rate and ETA on a terminal, plain periodic lines in a log file."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LINE_EVERY_SECONDS = 15.0


class Ticker:
    """Counts units done. `advance(n, "loss 2.31")` moves the bar, or prints a line at most every fifteen seconds."""

    def __init__(self, title: str, total: int, unit: str, progress: Progress | None) -> None:
        self.title, self.total, self.unit = title, total, unit
        self.done = 0
        self.started = self.printed = time.monotonic()
        self._progress = progress
        self._task = progress.add_task(title, total=total, rate="", note="") if progress is not None else None

    @property
    def rate(self) -> float:
        """Units per second since the start."""
        return self.done / max(time.monotonic() - self.started, 1e-9)

    def advance(self, units: int, note: str = "") -> None:
        """Count `units` more of the total, and show `note` beside the rate."""
        self.done += units
        rate = f"{self.rate:,.0f} {self.unit}/s"
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, advance=units, rate=rate, note=note)
        elif (now := time.monotonic()) - self.printed >= LINE_EVERY_SECONDS:
            self.printed = now
            left = (self.total - self.done) / max(self.rate, 1e-9)
            print(
                f"{self.title}: {self.done:,}/{self.total:,} {self.unit}, {rate}, {left:.0f} s left  {note}", flush=True
            )


@contextmanager
def ticker(title: str, total: int, unit: str) -> Iterator[Ticker]:
    """A `Ticker` for a stage of `total` units (`unit` is their plural name, such as "tokens")."""
    if sys.stderr.isatty():
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with Progress(*columns, console=Console(stderr=True)) as progress:
            yield Ticker(title, total, unit, progress)
    else:
        yield Ticker(title, total, unit, None)
