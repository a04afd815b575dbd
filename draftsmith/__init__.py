"""Draftsmith: train draft models and EAGLE heads for speculative decoding, and prove what they are worth."""

from typing import Any

__version__ = "0.1.0"
__all__ = ["speculative_decode"]


def __getattr__(name: str) -> Any:
    """Import the decoder on first use, so that `draftsmith --help` does not wait for torch."""
    if name == "speculative_decode":
        from draftsmith.eval.decode import speculative_decode

        return speculative_decode
    raise AttributeError(f"module 'draftsmith' has no attribute {name!r}")
