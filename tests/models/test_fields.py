"""Fields of a configuration: a value of another type is refused by name, and RoPE settings are complete or refused."""

import pytest

from draftsmith.errors import UserError
from draftsmith.models.fields import Fields, check_rope

BASE = {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("read", "values"),
    [
        ("whole", ("big", -1, 0, 1.5, True, 2**31, [1])),
        ("number", ("1e-6", None, 0, -1.0, True, float("nan"), float("inf"), 10**400)),
        ("flag", ("yes", 1, 0, [], "false")),
        ("ids", ("x", 5, {}, [1.0], [True], [None], [[1]], [2**40])),
        ("inside", ("x", [1], 5)),
    ],
)
def test_a_value_of_another_type_is_refused_with_its_place_and_name(read, values):
    for value in values:
        with pytest.raises(UserError, match=r"^heads/theirs/config\.json: key is .*; it must be .*: correct it"):
            getattr(Fields("heads/theirs/config.json", {"key": value}), read)("key")


def test_what_is_absent_has_its_default_or_is_missing_and_null_is_no_number():
    empty = Fields("config.json", {"null": None})
    assert (empty.whole("size", 3), empty.whole("null", 3), empty.number("size", 0.5)) == (3, 3, 0.5)
    assert (empty.flag("flag"), empty.flag("null", True), empty.ids("null"), dict(empty.inside("null").values)) == (
        False,
        True,
        None,
        {},
    )
    with pytest.raises(UserError, match="size is missing"):
        empty.whole("size")
    with pytest.raises(UserError, match="null is None"):
        empty.number("null", 1e-6)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_type": "garbage"}, "rope_type"),
        ({"rope_type": ["default"]}, "rope_type"),
        ({"rope_type": "llama3", "factor": 2.0}, "low_freq_factor"),
        ({"rope_type": "linear"}, "factor"),
        ({"rope_type": "linear", "factor": "two"}, "factor"),
        ({"rope_type": "yarn", "factor": 0}, "factor"),
        ({"rope_theta": "x"}, "rope_theta"),
        ({"rope_theta": None}, "rope_theta"),
        ({"partial_rotary_factor": 2.0}, "partial_rotary_factor"),
        ({"rope_type": "longrope", "short_factor": [1.0, "x"], "long_factor": [1.0]}, "1"),
        ({"mrope_section": [1, 2]}, "mrope_section"),
    ],
)
def test_rope_settings_that_cannot_be_computed_are_refused_by_name(changes, named):
    with pytest.raises(UserError, match=rf"config\.json.*: {named} is "):
        check_rope(Fields("config.json", BASE | changes))


def test_each_kind_of_rope_passes_when_it_is_complete():
    yarn = {"rope_type": "yarn", "factor": 4.0, "attention_factor": None, "truncate": False}
    long = {"rope_type": "longrope", "short_factor": [1.0, 2.0], "long_factor": [1, 2]}
    for settings in ({}, {"rope_type": "dynamic", "factor": 2}, yarn, long):
        check_rope(Fields("config.json", BASE | settings))
