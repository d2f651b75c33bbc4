"""ReplayLink: rows of the compute thread go out and are acknowledged, batches come in, a little ahead."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest
from nodes.running import joined, replay_node
from replay.wire.services import SCHEMA, eventually, promptly, rows_of, serials_of, serving

from dase_grpc import seeding
from dase_grpc.config.sections import TrainConfig
from dase_grpc.errors import (
    DrainingError,
    Halted,
    MalformedError,
    OverloadedError,
    StaleLeaseError,
    UnreachableError,
)
from dase_grpc.pace import Origin, Pace
from dase_grpc.replay.client.collected import CollectedSteps
from dase_grpc.replay.client.connection import Away, Outage
from dase_grpc.replay.client.handoff import Times, say_waits
from dase_grpc.replay.client.insert import Inserter
from dase_grpc.replay.client.link import GATHERED_ROWS, QUEUED_ROWS, ReplayLink, RowLink
from dase_grpc.replay.client.membership import LearnerConnection
from dase_grpc.replay.client.sample import Pacing, Sampler
from dase_grpc.replay.client.shards import Shards
from dase_grpc.replay.service import streams

BATCH = 4


def link_to(target, *, prefetch=2, batch_size=BATCH, **times):
    shards = Shards([LearnerConnection(target, timing=Times(**times))])
    return ReplayLink(shards, batch_size=batch_size, prefetch=prefetch, writer_id="w")


async def drained(link, inserting):
    link.no_more_rows()
    await promptly(inserting)


@asynccontextmanager
async def running(link):
    """Runs the link's streams; they end with the block."""
    async with asyncio.TaskGroup() as tasks:
        inserting = tasks.create_task(link.insert_rows())
        fetching = tasks.create_task(link.fetch_batches())
        yield inserting, fetching
        inserting.cancel()
        fetching.cancel()
        link.close()


async def on_thread(call, *arguments):
    """What a blocking call gives, which must not take long."""
    return await promptly(asyncio.to_thread(call, *arguments))


async def store_all(link, rows):
    for row in rows:
        await asyncio.to_thread(link.store, row)


async def test_all_rows_arrive_in_order_and_are_acknowledged_after_no_more_rows(service):
    link = link_to(await service.target())
    inserting = asyncio.ensure_future(link.insert_rows())
    await store_all(link, rows_of(1, 50))
    await drained(link, inserting)
    assert service.stored() == list(range(1, 51))
    assert link.unacknowledged == 0


async def test_rows_that_are_queued_before_the_stream_is_open_go_out_too(service):
    link = link_to(await service.target())
    await store_all(link, rows_of(1, 5))
    assert link.unacknowledged == 5
    await drained(link, link.insert_rows())
    assert (service.stored(), link.unacknowledged) == ([1, 2, 3, 4, 5], 0)


async def test_rows_that_wait_for_more_go_out_after_a_while(service):
    link = link_to(await service.target())
    async with running(link):
        for serial in range(1, 4):
            await store_all(link, rows_of(serial, serial))
            await eventually(lambda n=serial: service.stored() == list(range(1, n + 1)))


@pytest.fixture
def patient(monkeypatch):
    """What is sent, as numbers of rows."""
    sent, append = [], Inserter.append

    async def noted(self, rows):
        sent.append(len(rows))
        await append(self, rows)

    monkeypatch.setattr(Inserter, "append", noted)
    return sent


async def test_enough_rows_go_out_at_once_in_one_message(service, patient):
    link = link_to(await service.target(), gather_s=3_600.0)
    async with running(link):
        await store_all(link, rows_of(1, 3))
        await service.round_trips()
        assert not patient
        await on_thread(lambda: [link.store(row) for row in rows_of(4, GATHERED_ROWS)])
        await eventually(lambda: len(service.stored()) == GATHERED_ROWS)
    assert patient == [GATHERED_ROWS]


async def test_the_event_loop_is_woken_for_enough_rows_alone(service, patient, monkeypatch):
    link = link_to(await service.target(), gather_s=3_600.0)
    woken, wake = [], link._loop.call_soon_threadsafe

    def noted(callback, *arguments, **options):
        if getattr(callback, "__self__", None) is link._moved:
            woken.append(len(link._rows))
        return wake(callback, *arguments, **options)

    monkeypatch.setattr(link._loop, "call_soon_threadsafe", noted)
    async with running(link):
        await eventually(lambda: link._wanted == GATHERED_ROWS)
        await on_thread(lambda: [link.store(row) for row in rows_of(1, GATHERED_ROWS)])
        await eventually(lambda: len(service.stored()) == GATHERED_ROWS)
    assert woken == [GATHERED_ROWS]


async def test_rows_do_not_wait_for_more_once_no_more_will_come(service, patient):
    link = link_to(await service.target(), gather_s=3_600.0)
    inserting = asyncio.ensure_future(link.insert_rows())
    await store_all(link, rows_of(1, 3))
    await service.round_trips()
    await drained(link, inserting)
    assert (service.stored(), patient) == ([1, 2, 3], [3])


async def test_rows_that_updates_wait_for_go_out_at_once(service, patient):
    target = await service.target()
    link = RowLink(
        Shards([LearnerConnection(target, timing=Times(gather_s=3_600.0))]), writer_id="w", paced=True
    )
    await (sampler := Sampler(target, batch_size=1)).open(credits=0, pacing=Pacing(Pace(1, 10), 0, 0))
    inserting = asyncio.ensure_future(link.insert_rows())
    for serial in range(1, 4):
        await store_all(link, rows_of(serial, serial))
        await eventually(lambda n=serial: service.stored() == list(range(1, n + 1)))
    await drained(link, inserting)
    sampler.cancel()


async def test_many_rows_of_a_fast_thread_all_arrive():
    async with serving(capacity=20_000) as service:
        link = link_to(await service.target())
        inserting = asyncio.ensure_future(link.insert_rows())
        rows = rows_of(1, 10_000)
        await on_thread(lambda: [link.store(row) for row in rows])
        await drained(link, inserting)
        assert service.stored() == list(range(1, 10_001))


async def test_store_blocks_while_the_stream_does_not_move_and_closing_wakes_it(service):
    link = link_to(await service.target())
    rows = rows_of(1, QUEUED_ROWS + 1)
    await on_thread(lambda: [link.store(row) for row in rows[:-1]])
    blocked = asyncio.ensure_future(asyncio.to_thread(link.store, rows[-1]))
    await service.round_trips()
    assert not blocked.done()
    link.close()
    with pytest.raises(Halted):
        await promptly(blocked)
    assert link.unacknowledged == QUEUED_ROWS + 1


async def test_a_row_that_waits_when_ctrl_c_comes_is_not_stored(service, monkeypatch):
    link = link_to(await service.target())
    rows = rows_of(1, QUEUED_ROWS + 1)
    await on_thread(lambda: [link.store(row) for row in rows[:-1]])

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(link._rows._changed, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        link.store(rows[-1])
    assert link.unacknowledged == QUEUED_ROWS


async def test_no_batch_is_drawn_before_the_first_one_is_asked_for(service):
    service_target = await service.target()
    service.fill(10)
    link = link_to(service_target)
    async with running(link):
        await service.round_trips()
        assert service.run.store.traffic.sampled.total() == 0
        rows, buffer_size = await on_thread(link.next)
        assert (rows.shape, buffer_size) == ((BATCH, SCHEMA.width), 10)


@pytest.mark.parametrize("prefetch", [1, 2, 5])
async def test_never_more_than_prefetch_batches_are_drawn_ahead_of_their_use(service, prefetch):
    target = await service.target()
    service.fill(10)
    link = link_to(target, prefetch=prefetch)
    sampled = service.run.store.traffic.sampled
    async with running(link):
        for used in range(1, 6):
            await on_thread(link.next)
            least = used + prefetch - max(1, prefetch // 2)
            await eventually(lambda n=least: sampled.total() > BATCH * n)
            await service.round_trips()
            assert BATCH * least < sampled.total() <= BATCH * (used + prefetch)


async def test_batches_are_asked_for_by_portions_that_come_in_one_message(service, monkeypatch):
    granted, read = [], []
    grant, receive = Sampler.grant, Sampler._receive

    async def noted(self, credits, **told):
        granted.append(credits)
        await grant(self, credits, **told)

    async def counted(self):
        before = len(self._here)
        await receive(self)
        read.append(len(self._here) - before)

    monkeypatch.setattr(Sampler, "grant", noted)
    monkeypatch.setattr(Sampler, "_receive", counted)
    target = await service.target()
    service.fill(10)
    link = link_to(target, prefetch=6)
    async with running(link):
        for _ in range(12):
            await on_thread(link.next)
        await eventually(lambda: sum(read) >= 15)
    assert granted[0] == 6
    assert set(granted[1:]) == {3}
    assert set(read) == {3}


async def test_each_batch_that_actors_may_wait_for_is_told_as_soon_as_it_is_taken(service, monkeypatch):
    used, grant = [], Sampler.grant

    async def noted(self, credits, **told):
        used.append(told["used"])
        await grant(self, credits, **told)

    monkeypatch.setattr(Sampler, "grant", noted)
    connection = LearnerConnection(await service.target())
    service.fill(40)
    train = TrainConfig(explore=False, actors=1, step_error_buffer=40)
    origin = Origin(connection.target.member.buffer_id, 0)
    collected = CollectedSteps(connection, train=train, first_steps=1, origin=origin)
    link = ReplayLink(Shards([connection]), batch_size=BATCH, prefetch=8, writer_id="w", collected=collected)
    async with running(link):
        for taken in range(1, 5):
            await on_thread(link.next)
            await eventually(lambda n=taken: sum(used) == n and link.prefetched == 8)


async def test_batches_come_in_the_order_in_which_they_were_drawn(service):
    target = await service.target()
    service.fill(100)
    link = link_to(target, batch_size=1, prefetch=3)
    async with running(link):
        drawn = [serials_of((await on_thread(link.next))[0]) for _ in range(10)]
    rng = seeding.generator(7, seeding.Purpose.SAMPLING, 0, 0)
    assert drawn == [serials_of(service.run.store.ring.sample(1, rng)) for _ in range(10)]


@pytest.mark.slow
async def test_a_wait_is_explained_by_the_service_after_a_while(caplog):
    async with serving(min_size=10) as service:
        link = link_to(await service.target(), say_wait_after_s=0.05)
        assert link.wait is None
        async with running(link):
            saying = asyncio.ensure_future(
                say_waits(lambda: link.wait, count=lambda reason, seconds: None, timing=Times())
            )
            asking = asyncio.ensure_future(asyncio.to_thread(link.next))
            await eventually(lambda: link.wait is not None and "more" in link.wait.text)
            assert link.wait.text == "waiting for 10 more transitions (0 of 10)"
            assert link.wait.reason == "warm_up"
            await eventually(lambda: "waiting for" in caplog.text)
            service.fill(10)
            await promptly(asking)
            assert link.wait is None
            saying.cancel()
    assert caplog.text.count("waiting for") == 1


async def test_while_the_replay_is_away_a_wait_says_whether_there_is_room_to_explore_on(service, monkeypatch):
    monkeypatch.setattr("dase_grpc.replay.client.link.QUEUED_ROWS", 2)
    link = link_to(await service.target(), say_wait_after_s=0.0)
    connection = link._shards.first
    connection.outage = Outage(time.monotonic() - 60, Away.UNREACHABLE)
    row, _ = rows_of(1, 2)
    link.store(row)
    assert await on_thread(link.next) is None
    exploring = link.wait
    link.store(row)
    full = link.wait
    where = f"waiting for the replay service at {connection.target.address}, which has not answered for 60 s"
    assert (exploring.exploring, exploring.text) == (
        True,
        f"{where}; 1 transition is kept for it, exploring on meanwhile",
    )
    assert (full.exploring, full.text) == (False, f"{where}; 2 transitions are kept for it, no more fit")


async def test_while_batches_are_held_a_wait_ends_without_one_and_none_is_drawn_before_the_next_is_asked_for(
    service,
):
    link = link_to(await service.target())
    link._batches.asked.set()
    link.hold_batches()
    async with running(link):
        service.fill(10)
        await service.round_trips()
        assert service.run.store.traffic.sampled.total() == 0
        assert await on_thread(link.next) is not None


async def test_a_wait_that_is_under_way_when_batches_are_held_is_over_and_is_none_any_more(service):
    link = link_to(await service.target(), wake_s=0.02, say_wait_after_s=0.0)  # none of its streams is open
    asking = asyncio.ensure_future(asyncio.to_thread(link.next))
    await eventually(lambda: link.wait is not None)
    link.hold_batches()
    assert await promptly(asking) is None
    assert link.wait is None


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.slow
async def test_stopping_batches_wakes_the_thread_and_a_batch_that_still_comes_is_no_error(asked):
    async with serving(min_size=10) as service:
        link = link_to(await service.target())
        async with running(link) as (inserting, fetching):
            asking = asyncio.ensure_future(asyncio.to_thread(link.next))
            await eventually(lambda: link._fetcher.waiting is not None)
            link.stop_batches()  # which `close` does, too
            with pytest.raises(Halted):
                await promptly(asking)
            if asked:
                service.fill(10)
                await promptly(fetching)
            await store_all(link, rows_of(1, 3))
            await drained(link, inserting)
            assert link.unacknowledged == 0


async def test_a_refused_row_reaches_the_caller_of_insert_rows(service):
    link = link_to(await service.target(0))
    inserting = asyncio.ensure_future(link.insert_rows())
    await store_all(link, rows_of(1, 1, agent_id=5))
    with pytest.raises(MalformedError, match="another agent than its own"):
        await promptly(inserting)
    assert link.unacknowledged == 1


async def test_a_lost_lease_reaches_the_callers_of_both_streams(service):
    target = await service.target()
    service.fill(5)
    link = link_to(target)
    inserting, fetching = map(asyncio.ensure_future, (link.insert_rows(), link.fetch_batches()))
    await on_thread(link.next)
    await service.client.leave(target.member, reason="test")
    await store_all(link, rows_of(1, 1))
    taking = asyncio.gather(
        asyncio.to_thread(lambda: [link.next() for _ in range(10)]), return_exceptions=True
    )
    try:
        for stream in (inserting, fetching):
            with pytest.raises(StaleLeaseError, match="fenced off"):
                await promptly(stream)
    finally:
        link.close()
        (outcome,) = await promptly(taking)
    assert isinstance(outcome, Halted)


async def test_a_draining_replay_reaches_the_callers_of_both_streams():
    async with replay_node() as replay, joined(replay.address) as target:
        link = link_to(target)
        streams = [*map(asyncio.ensure_future, (link.insert_rows(), link.fetch_batches()))]
        await store_all(link, rows_of(1, 3))
        await on_thread(link.next)
        await replay.end()
        for stream in streams:
            with pytest.raises((DrainingError, UnreachableError)):
                await promptly(stream)
        link.close()


@pytest.mark.parametrize("shards", [1, 2])
async def test_a_replay_that_is_overloaded_for_too_long_is_given_up(monkeypatch, caplog, shards):
    """Each attempt is refused, so none of them ends the outage."""
    monkeypatch.setattr(streams, "MAX_HELD_BYTES", BATCH)
    async with serving() as service:
        target = await service.target()
        connections = [LearnerConnection(target, timeout_s=0.2) for _ in range(shards)]
        link = ReplayLink(Shards(connections), batch_size=BATCH, prefetch=2, writer_id="w")
        with pytest.raises(OverloadedError, match=r"gave up after .* over the limit of 4;"):
            await promptly(link.fetch_batches())
    assert "answers again" not in caplog.text
