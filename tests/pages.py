"""Results of an evaluation that never ran: run folders to make reports of."""

import json
from pathlib import Path
from typing import Any


def interval(value: float, margin: float = 0.05, count: int = 100) -> dict[str, Any]:
    return {"value": value, "low": value - margin, "high": value + margin, "count": count}


def entry(domain: str, tokens: float, gain: float | None = None, **changes: Any) -> dict[str, Any]:
    """One result; `gain` is its measured speed-up."""
    result = {
        "domain": domain,
        "temperature": 0.0,
        "K": 5,
        "tree": "chain",
        "prompts": 40,
        "verifies": 812,
        "identical": [40, 40],
        "alpha": interval(0.7),
        "tokens_per_verify": interval(tokens),
        "n_alpha": [interval(0.7 - 0.05 * k) for k in range(5)],
        "speedup": interval(gain, 0.02) if gain is not None else {},
    }
    return result | changes


def write(run: Path, **drafts: list[dict[str, Any]]) -> Path:
    """A run folder with these results; `_` in a name stands for `-`."""
    (run / "eval").mkdir(parents=True, exist_ok=True)
    for name, results in drafts.items():
        document = {"schema": 1, "draft": {"kind": "x", "path": None, "parameters": 5}, "results": results}
        (run / "eval" / f"{name.replace('_', '-')}.json").write_text(json.dumps(document))
    return run
