"""Which slots are trained, and how rows become batches (FAULTS 1, 5, 6)."""

import numpy as np
import pytest
import torch

from draftsmith.data.batches import collate, collate_rows, length_buckets, supervised_slots
from draftsmith.data.cache.reader import CachedRow
from draftsmith.data.rows import Row

ONE_SPAN = [False] * 5 + [True] * 4  # five prompt tokens, four answer tokens (x5..x8)
TWO_SPANS = [False] * 3 + [True] * 2 + [False] * 3 + [True] * 2  # answers x3 x4 and x8 x9
DRAFT_LM, EAGLE = 1, 2


def row(mask: list[bool]) -> Row:
    return Row(np.arange(len(mask), dtype=np.int32), np.asarray(mask), "chat", "d")


def pairs(masks: list[list[bool]], offset: int) -> list[list[tuple[int, int]]]:
    """(input slot, predicted token) of every trained slot, for each row of one batch."""
    batch = collate_rows([row(mask) for mask in masks])
    trained = supervised_slots(batch.supervised, batch.lengths, offset)
    return [[(slot, slot + offset) for slot in line.nonzero().flatten().tolist()] for line in trained]


def test_draft_lm_trains_the_slot_before_each_answer_token() -> None:
    assert pairs([ONE_SPAN], DRAFT_LM) == [[(4, 5), (5, 6), (6, 7), (7, 8)]]


def test_eagle_slot_t_predicts_t_plus_2_plus_k() -> None:
    assert pairs([ONE_SPAN], EAGLE) == [[(3, 5), (4, 6), (5, 7), (6, 8)]]
    assert pairs([ONE_SPAN], EAGLE + 2) == [[(1, 5), (2, 6), (3, 7), (4, 8)]]
    assert pairs([ONE_SPAN], EAGLE + 4) == [[(0, 6), (1, 7), (2, 8)]]  # nothing before slot 0 could predict x5


def test_two_answer_spans_never_train_the_header_between_them() -> None:
    assert pairs([TWO_SPANS], DRAFT_LM) == [[(2, 3), (3, 4), (7, 8), (8, 9)]]
    assert pairs([TWO_SPANS], EAGLE) == [[(1, 3), (2, 4), (6, 8), (7, 9)]]


@pytest.mark.parametrize("offset", [DRAFT_LM, EAGLE, EAGLE + 3])
def test_batch_of_two_trains_the_pairs_of_each_row_alone(offset: int) -> None:
    alone = pairs([ONE_SPAN], offset) + pairs([TWO_SPANS], offset)
    assert pairs([ONE_SPAN, TWO_SPANS], offset) == alone


def test_padding_is_untrained_even_where_the_mask_says_otherwise() -> None:
    trained = supervised_slots(torch.ones(1, 6, dtype=torch.bool), torch.tensor([4]), 1)
    assert trained.tolist() == [[True, True, True, False, False, False]]


def test_offset_beyond_the_row_trains_nothing() -> None:
    assert pairs([[False, True]], 2) == [[]]
    assert pairs([[False, True]], 7) == [[]]


def test_each_row_is_in_one_batch_and_no_batch_exceeds_its_tokens() -> None:
    lengths = np.random.default_rng(0).integers(1, 200, 500)
    batches = length_buckets(lengths, 400, np.random.default_rng(1))
    assert sorted(index for batch in batches for index in batch) == list(range(500))
    assert max(len(batch) * lengths[batch].max() for batch in batches) <= 400
    padding = 1 - lengths.sum() / sum(len(batch) * lengths[batch].max() for batch in batches)
    assert padding < 0.1


def test_buckets_depend_on_the_seed_alone() -> None:
    lengths = np.random.default_rng(0).integers(1, 50, 60)
    one, same, other = (length_buckets(lengths, 100, np.random.default_rng(seed)) for seed in (3, 3, 4))
    assert one == same
    assert one != other


def test_row_longer_than_a_batch_is_a_batch_of_its_own() -> None:
    batches = length_buckets([500, 3, 4], 100, np.random.default_rng(0))
    assert [0] in batches
    assert sum(map(len, batches)) == 3


def test_a_batch_beyond_all_rows_takes_them_all_however_large() -> None:
    assert sorted(length_buckets([3, 1, 2], 10**18, np.random.default_rng(0))[0]) == [0, 1, 2]


def test_no_rows_give_no_batches() -> None:
    assert length_buckets([], 100, np.random.default_rng(0)) == []


def test_collate_pads_on_the_right_and_padded_teacher_slots_hold_no_mass() -> None:
    def cached(length: int) -> CachedRow:
        states = np.full((length, 2, 3), length, dtype=np.float32)
        teacher = np.zeros((length, 1), dtype=np.int64), np.zeros((length, 1), dtype=np.float32)
        ids = np.full(length, 7, dtype=np.int32)
        return CachedRow(ids, np.ones(length, dtype=bool), states, states[:, 0], teacher, "code")

    batch = collate([cached(2), cached(4)])
    assert batch.token_ids.tolist() == [[7, 7, 0, 0], [7, 7, 7, 7]]
    assert batch.supervised.tolist() == [[True, True, False, False], [True] * 4]
    assert batch.lengths.tolist() == [2, 4]
    assert batch.taps is not None
    assert batch.taps.shape == (2, 4, 2, 3)
    assert batch.last is not None
    assert batch.last[0, :, 0].tolist() == [2, 2, 0, 0]
    assert batch.teacher is not None
    assert batch.teacher.log_probs.exp()[0, :, 0].tolist() == pytest.approx([1, 1, 0, 0], abs=1e-30)
