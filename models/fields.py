"""Fields of a `config.json`, each read as the type that it must have, and RoPE settings held against what can be computed.

A value of another type would be taken for something else without a word ("no" for true, null for a number), so it is refused by
name. Knows JSON and RoPE; knows no files, tensors or kinds of heads.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draftsmith.errors import UserError

MOST = 2**31 - 1  # of any size or id
SHOWN = 60  # characters of a wrong value

#: What each kind of RoPE needs beside its base (`transformers`' names).
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor"),
}
#: Numbers of RoPE settings: the least value of each, and whether it may be that value.
ROPE_NUMBERS: dict[str, tuple[float, bool]] = {
    "rope_theta": (0, False),
    "partial_rotary_factor": (0, False),
    "factor": (1, True),
    "attention_factor": (0, False),
    "low_freq_factor": (0, False),
    "high_freq_factor": (0, False),
    "beta_fast": (0, False),
    "beta_slow": (0, False),
    "mscale": (0, True),
    "mscale_all_dim": (0, True),
}


@dataclass(frozen=True)
class Fields:
    """One JSON object. place: how messages name it, such as `heads/theirs/config.json`, with a dotted path behind it.

    Every reader raises UserError for a value of another type; `default` stands for a field that is absent.
    """

    place: str
    values: Mapping[str, Any]

    def wrong(self, key: str, wanted: str) -> UserError:
        """What to raise for a field that is not what it must be."""
        if key not in self.values:
            return UserError(f"{self.place}: {key} is missing; it must be {wanted}: add it as the head was trained")
        text = repr(self.values[key])
        text = text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
        return UserError(f"{self.place}: {key} is {text}; it must be {wanted}: correct it, or get the file again")

    def whole(self, key: str, default: int | None = None) -> int:
        """A size: 1 to 2³¹ − 1. null means absent, as many configurations write it."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST:
            raise self.wrong(key, f"a whole number from 1 to {MOST}")
        return value

    def number(self, key: str, default: float | None = None, least: float = 0, equal: bool = False) -> float:
        """A finite number above `least`, or equal to it if it may be. null is refused."""
        if key not in self.values and default is not None:
            return default
        value = self.values.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            enough = value >= least if equal else value > least
            if enough and value <= MOST:  # NaN is neither
                return value
        raise self.wrong(key, f"a number {'of at least' if equal else 'above'} {least:g}")

    def flag(self, key: str, default: bool = False) -> bool:
        """true or false; null means absent."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def ids(self, key: str) -> list[int] | None:
        """A list of whole numbers; None where there is none, or an empty one."""
        value = self.values.get(key)
        if value is None or value == []:
            return None
        if not isinstance(value, list) or not all(type(i) is int and abs(i) <= MOST for i in value):
            raise self.wrong(key, "a list of whole numbers")
        return value

    def inside(self, key: str) -> "Fields":
        """The object at a field; an empty one where it is absent or null."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise self.wrong(key, "an object")
        return Fields(f"{self.place}: {key}", value or {})


def check_rope(rope: Fields) -> None:
    """Raises UserError unless RoPE settings (`transformers`' `rope_parameters`) are complete, known and possible."""
    kind = rope.values.get("rope_type")
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        raise rope.wrong("rope_type", f"one of {', '.join(ROPE_TYPES)}")
    for key in ROPE_TYPES[kind]:
        if rope.values.get(key) is None:
            raise rope.wrong(key, f"given, because rope_type is {kind}")
    for key, value in rope.values.items():
        if key == "rope_type" or value is None:
            continue
        if key in ROPE_NUMBERS:
            least, equal = ROPE_NUMBERS[key]
            rope.number(key, least=least, equal=equal)
        elif key == "original_max_position_embeddings":
            rope.whole(key)
        elif key == "truncate":
            rope.flag(key)
        elif key in ("short_factor", "long_factor"):
            _factors(rope, key)
        else:
            raise rope.wrong(key, "left out, for our RoPE knows no such setting")
    if rope.values.get("rope_theta") is None:
        raise rope.wrong("rope_theta", "a number above 0")
    if (rope.values.get("partial_rotary_factor") or 0) > 1:
        raise rope.wrong("partial_rotary_factor", "at most 1")


def _factors(rope: Fields, key: str) -> None:
    values = rope.values[key]
    if not isinstance(values, list | tuple) or not values:
        raise rope.wrong(key, "a list of numbers above 0")
    for index, value in enumerate(values):
        Fields(f"{rope.place}: {key}", {str(index): value}).number(str(index))
