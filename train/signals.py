"""Signals that ask a command to end. Knows nothing of what the command does."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def on_signals(act: Callable[[int], None]) -> Iterator[None]:
    """SIGINT and SIGTERM call `act(number)` inside the block; in a thread, which gets no signals, nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    old = [signal.signal(number, lambda found, _: act(found)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, old, strict=True):
            signal.signal(number, handler)
