"""Which prompts of held-out rows stand in training rows (FAULTS 11)."""

from pathlib import Path

import numpy as np
import pytest

from draftsmith.data.contamination import TEXT_PROMPT, begun, repeated_prompts
from draftsmith.data.corpus import DataSettings
from draftsmith.data.rows import Row, Rows, write_rows

Spans = list[tuple[int, int]]


def rows(folder: Path, *given: tuple[list[int], Spans]) -> Rows:
    """Rows of these ids, supervised in these spans."""
    made = []
    for ids, spans in given:
        supervised = np.zeros(len(ids), dtype=bool)
        for start, end in spans:
            supervised[start:end] = True
        made.append(Row(np.asarray(ids, dtype=np.int32), supervised, "chat", "x"))
    write_rows(made, folder, DataSettings(), "")
    return Rows(folder)


TEXT = list(range(100, 100 + TEXT_PROMPT))
TALK = ([1, 2, 3, 4, 5, 6], [(2, 3), (5, 6)])  # prompts [1, 2] and [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("held_out", "found"),
    [
        (([1, 2, 9], [(2, 3)]), 1),
        (([1, 2, 3, 4, 5, 9], [(5, 6)]), 1),  # the prompt of a later turn
        (([1, 2, 3, 4, 9], [(4, 5)]), 0),  # begins a training row, and is no prompt in it
        (([1, 9, 9], [(2, 3)]), 0),
        (([9, 2, 9], [(2, 3)]), 0),
        (([*TEXT, 9], [(1, TEXT_PROMPT + 1)]), 1),
        (([*TEXT[:-1], 9, 9], [(1, TEXT_PROMPT + 1)]), 0),
    ],
)
def test_a_prompt_counts_where_a_training_row_has_exactly_it_as_a_prompt(
    tmp_path: Path, held_out: tuple[list[int], Spans], found: int
) -> None:
    train = rows(tmp_path / "train", TALK, ([*TEXT, 7, 8], [(1, TEXT_PROMPT + 2)]))
    measured = rows(tmp_path / "held_out", held_out, ([70, 71, 72], [(2, 3)]), ([70, 71], [(1, 2)]))
    # The last row is a text too short to be a prompt.
    assert repeated_prompts(train, measured) == {"prompts": 2, "repeated": found}


def test_a_prompt_of_any_length_counts_where_a_training_row_begins_with_it(tmp_path: Path) -> None:
    train = rows(tmp_path, TALK, ([*TEXT, 7, 8], [(1, TEXT_PROMPT + 2)]))
    assert begun(train, [[1, 2], [1, 2, 3], TEXT[:5], [*TEXT, 7, 8]]) == 4
    assert begun(train, [[2, 3], [1, 3], [*TEXT, 7, 9], [1, 2, 3, 4, 5, 6, 7]]) == 0
    assert begun(train, [[1, 2], [1, 2], [9]]) == 2, "each prompt counts"
