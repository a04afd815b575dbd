"""The base of every settings class. Each stage declares its own fields beside the code that uses them."""

import os
import re
from typing import Any

from pydantic import BaseModel, ConfigDict

SEEDS = 2**63  # what every generator of random numbers takes


class Settings(BaseModel):
    """Immutable, an unknown key is an error (`draftsmith.config` turns it into one line with the nearest valid key), and every
    number is finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def flat(values: dict[str, Any], separator: str = ".") -> dict[str, Any]:
    """Nested dictionaries as one, in their order: {"a": {"b": 1}} becomes {"a.b": 1}."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found |= {f"{key}{separator}{inner}": item for inner, item in flat(value, separator).items()}
        else:
            found[str(key)] = value
    return found


SECRET = re.compile(r"(^|[_.-])(api_?key|access_?key|key|token|secret|password|passwd|credentials?)$", re.IGNORECASE)


def without_secrets(values: Any) -> Any:
    """Nested values for a file, a log or a tracker: text under a name such as `api_key` or `token` is left out, and so is what
    the environment holds under such a name (HF_TOKEN, WANDB_API_KEY), wherever it was written."""
    known = [value for name, value in os.environ.items() if SECRET.search(name) and len(value) >= 8]

    def clean(value: Any, name: str) -> Any:
        if isinstance(value, dict):
            return {key: clean(inner, str(key)) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return [clean(inner, name) for inner in value]
        if isinstance(value, str) and (SECRET.search(name) or any(secret in value for secret in known)):
            return "(left out)"
        return value

    return clean(values, "")
