"""Outbox: rows keep their numbers until they are acknowledged, whatever the service says it has."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dase_grpc.errors import DaseError
from dase_grpc.replay.client.insert import Outbox


def block(first, last):
    return np.arange(first, last + 1)[:, np.newaxis]


def kept(outbox):
    return [int(value) for rows in outbox.blocks() for value in rows[:, 0]]


@pytest.fixture
def outbox():
    """Rows 1..10 in two blocks, sent to a buffer that had committed none."""
    outbox = Outbox()
    assert outbox.resume(0, buffer_id="a") == 0
    outbox.add(block(1, 6))
    outbox.add(block(7, 10))
    return outbox


@pytest.mark.parametrize("seq", range(11))
def test_what_is_acknowledged_is_let_go_within_a_block_too(outbox, seq):
    outbox.acknowledge(seq)
    assert (kept(outbox), len(outbox), outbox.acknowledged) == ([*range(seq + 1, 11)], 10 - seq, seq)
    outbox.acknowledge(max(0, seq - 3))
    assert kept(outbox) == [*range(seq + 1, 11)]


def test_each_acknowledged_row_is_counted_once():
    counted = []
    outbox = Outbox(count=counted.append)
    outbox.resume(0, buffer_id="a")
    outbox.add(block(1, 10))
    for seq in (3, 2, 3, 10):
        outbox.acknowledge(seq)
    assert sum(counted) == outbox.acknowledged == 10


def test_what_the_service_committed_before_the_break_is_not_sent_again(outbox):
    outbox.acknowledge(2)
    assert outbox.resume(8, buffer_id="a") == 0
    assert (kept(outbox), outbox.acknowledged) == ([9, 10], 8)


def test_a_service_that_lost_acknowledged_rows_gets_the_others_as_the_next_numbers(outbox):
    outbox.acknowledge(6)
    assert outbox.resume(4, buffer_id="a") == 2
    assert (kept(outbox), outbox.acknowledged) == ([7, 8, 9, 10], 6)
    outbox.acknowledge(5)  # row 7 is number 5 now
    assert kept(outbox) == [8, 9, 10]


@pytest.mark.parametrize("committed", [0, 3, 500])
def test_another_buffer_gets_all_that_is_kept_after_what_it_has(outbox, committed):
    outbox.acknowledge(6)
    assert outbox.resume(committed, buffer_id="b") == 0
    assert kept(outbox) == [7, 8, 9, 10]
    outbox.acknowledge(committed + 1)
    assert kept(outbox) == [8, 9, 10]


def test_a_fresh_process_goes_on_from_what_its_writer_has_committed():
    outbox = Outbox()
    assert outbox.resume(1_000, buffer_id="a") == 0
    outbox.add(block(1, 3))
    outbox.acknowledge(1_002)
    assert (kept(outbox), outbox.acknowledged) == ([3], 2)


def test_rows_that_were_never_sent_cannot_be_committed(outbox):
    with pytest.raises(DaseError, match="another node writes under the same name"):
        outbox.resume(11, buffer_id="a")
    with pytest.raises(DaseError, match="acknowledged row 11, but only 10 were sent"):
        outbox.acknowledge(11)


@given(st.data())
@pytest.mark.slow
def test_a_service_that_forgets_and_delays_gets_each_row_once(data):
    """Model: sent rows arrive in order or not at all, acknowledgements too, and numbers decide."""
    outbox, stored, made, buffer = Outbox(), [], 0, 0
    outbox.resume(0, buffer_id="0")
    for _ in range(data.draw(st.integers(1, 12))):
        count = data.draw(st.integers(1, 5))
        outbox.add(block(made + 1, made + count))
        made += count
        first = outbox._next - len(outbox)
        arrived = data.draw(st.integers(0, len(outbox)))
        for number, value in list(enumerate(kept(outbox), first))[:arrived]:
            if number == len(stored) + 1:
                stored.append(value)
        outbox.acknowledge(data.draw(st.integers(min(first - 1, len(stored)), len(stored))))
        if data.draw(st.booleans()):
            assert outbox.resume(len(stored), buffer_id=str(buffer)) == 0
    assert outbox.resume(len(stored), buffer_id=str(buffer)) == 0
    assert stored + kept(outbox) == [*range(1, made + 1)]
