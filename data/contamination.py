"""Prompts of held-out rows that the training rows hold as well: what is measured on them is not what strangers will see.

Knows rows. Does not know tokenizers or how prompts are decoded. Memory: one hash for each held-out prompt.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import xxhash

from draftsmith.data.rows import Row, Rows

TEXT_PROMPT = 48  # tokens of a text that count as its prompt: the default of evaluation.prompt_tokens


def repeated_prompts(train: Rows, held_out: Rows) -> dict[str, int]:
    """How many held-out rows have a prompt ("prompts"), and how many of these ("repeated") a training row begins with.

    A dialogue's prompt is all before its first answer, a text's its first `TEXT_PROMPT` tokens. A training row has as many
    prompts as it has answers.
    """
    asked = [key for row in held_out.read(range(len(held_out))) if (key := next(_prompts(row), None)) is not None]
    trained: set[int] = set()
    wanted = set(asked)
    for row in train.read(range(len(train))):
        trained.update(key for key in _prompts(row) if key in wanted)
    return {"prompts": len(asked), "repeated": sum(key in trained for key in asked)}


def begun(train: Rows, prompts: Sequence[Sequence[int]]) -> int:
    """How many of these prompts (token ids) a training row begins with."""
    keys = [(len(ids), xxhash.xxh3_64_intdigest(np.asarray(ids, dtype=np.int32).tobytes())) for ids in prompts]
    lengths, wanted, found = sorted({length for length, _ in keys}), set(keys), set()
    for row in train.read(range(len(train))):
        content, start = xxhash.xxh3_64(), 0
        for length in lengths:
            if length > len(row.token_ids):
                break
            content.update(row.token_ids[start:length].tobytes())
            start = length
            if (key := (length, content.intdigest())) in wanted:
                found.add(key)
    return sum(key in found for key in keys)


def _prompts(row: Row) -> Iterator[int]:
    """A hash of the ids before each span of supervised tokens."""
    spoken = np.concatenate([[False], row.supervised])
    ends = np.flatnonzero(~spoken[:-1] & spoken[1:])
    if ends[:1] == [1]:  # a text: supervised from its second token on
        ends = np.asarray([TEXT_PROMPT] if len(row.token_ids) > TEXT_PROMPT else [], dtype=np.int64)
    content, start = xxhash.xxh3_64(), 0
    for end in map(int, ends):
        content.update(row.token_ids[start:end].tobytes())
        yield content.intdigest()
        start = end
