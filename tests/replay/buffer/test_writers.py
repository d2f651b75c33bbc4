"""Writers that are gone make room for new ones; those that may come back do not."""

import pytest
from store_cases import BACKENDS, rows_of, serials_of, store_on

from dase_grpc.errors import TooManyWritersError
from dase_grpc.replay.buffer.store import FORGOTTEN_AT_ONCE, GONE_AFTER_S, MAX_AGENT_WRITERS, WriterWatch

WRITER = (0, "w")


@pytest.fixture(params=BACKENDS)
def store(request):
    with store_on(request.param, 400, max_writers=MAX_AGENT_WRITERS + 1) as opened:
        yield opened


def come(store, writer, *, now, agent_id=0, leaves=False):
    """A writer that stores one row over a stream of its own."""
    store.make_room(writer, agent_id=agent_id, now=now)
    store.watch.opened((agent_id, writer))
    store.append(writer, 1, rows_of([0], agent_id), agent_id=agent_id)
    store.watch.closed((agent_id, writer), now)
    if leaves:
        store.watch.leave((agent_id, writer))


def test_an_agent_may_have_any_number_of_writers_one_after_the_other(store):
    for number in range(2 * MAX_AGENT_WRITERS):
        come(store, f"actor-{number}", now=0.0, leaves=True)
    assert store.traffic.inserted[0] == 2 * MAX_AGENT_WRITERS
    assert store.forgotten % FORGOTTEN_AT_ONCE == 0
    assert store.committed(f"actor-{number}", agent_id=0) == 1


def test_a_writer_that_ended_without_saying_so_is_kept_for_a_while(store):
    for number in range(MAX_AGENT_WRITERS):
        come(store, f"actor-{number}", now=float(number))
    with pytest.raises(TooManyWritersError, match="is forgotten after 900 s"):
        come(store, "one more", now=GONE_AFTER_S - 1)
    come(store, "one more", now=GONE_AFTER_S + 2)
    gone = [
        number for number in range(MAX_AGENT_WRITERS) if not store.committed(f"actor-{number}", agent_id=0)
    ]
    assert gone == [0, 1, 2]
    assert len(serials_of(store.ring.ordered())) == MAX_AGENT_WRITERS + 1


def test_a_full_table_forgets_writers_of_any_agent(store):
    come(store, "another agent's", now=0.0, agent_id=1)
    for number in range(MAX_AGENT_WRITERS):
        come(store, f"actor-{number}", now=GONE_AFTER_S)
    come(store, "of a third", now=GONE_AFTER_S, agent_id=2)
    assert [store.committed("another agent's", agent_id=1), store.committed("actor-0", agent_id=0)] == [0, 1]


def test_a_writer_with_a_stream_is_never_gone():
    watch = WriterWatch()
    watch.opened(WRITER)
    watch.opened(WRITER)
    watch.closed(WRITER, 1.0)
    watch.leave(WRITER)
    assert watch.gone([WRITER], 1e9) == []
    watch.closed(WRITER, 2.0)
    assert watch.gone([WRITER], 2.0) == [WRITER]


def test_a_writer_that_said_nothing_is_gone_after_a_while():
    watch = WriterWatch()
    watch.opened(WRITER)
    watch.closed(WRITER, 2.0)
    assert watch.gone([WRITER], 1.9 + GONE_AFTER_S) == []
    assert watch.gone([WRITER], 2.0 + GONE_AFTER_S) == [WRITER]


def test_writers_of_an_earlier_start_are_gone_some_time_after_this_one():
    watch = WriterWatch(began=50.0)
    assert watch.gone([WRITER], 49.0 + GONE_AFTER_S) == []
    assert watch.gone([WRITER], 50.0 + GONE_AFTER_S) == [WRITER]
