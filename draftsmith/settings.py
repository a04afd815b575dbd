"""The base of every settings class. Each stage declares its own fields beside the code that uses them."""

from typing import Any

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Immutable, and an unknown key is an error (`draftsmith.config` turns it into one line with the nearest valid key)."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def flat(values: dict[str, Any], separator: str = ".") -> dict[str, Any]:
    """Nested dictionaries as one, in their order: {"a": {"b": 1}} becomes {"a.b": 1}."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            found |= {f"{key}{separator}{inner}": item for inner, item in flat(value, separator).items()}
        else:
            found[str(key)] = value
    return found
