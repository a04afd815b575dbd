"""Content met before is known again, however much came between."""

import pytest

from draftsmith.data import seen
from draftsmith.data.seen import Seen


@pytest.mark.parametrize("recent", [0, 3, 1000])
def test_each_content_is_new_once(recent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seen, "RECENT", recent)
    found = Seen()
    numbers = [(index * 37) % 101 for index in range(300)]
    before: set[int] = set()
    for number in numbers:
        assert found.add(b"n", number.to_bytes(2, "big")) == (number not in before)
        before.add(number)
    assert len(found) == len(before) == 101
