"""Sample: uniformly drawn batches, never more than were granted, and a stated reason while waiting."""

import asyncio

import numpy as np
import pytest
from replay.wire.services import (
    SCHEMA,
    WIDE,
    answers,
    eventually,
    promptly,
    rows_of,
    sample_header,
    sent,
    serials_of,
    serving,
)

from dase_grpc import seeding
from dase_grpc.errors import DaseError, UnreachableError
from dase_grpc.replay.buffer.sampling import Sampling
from dase_grpc.replay.client.cluster import StreamTarget
from dase_grpc.replay.client.insert import Inserter
from dase_grpc.replay.client.sample import Sampler
from dase_grpc.replay.wire.messages import Membership
from dase_grpc.replay.wire.packed import ROWS_BYTES, Frame, Waiting, read_response
from dase_grpc.replay.wire.v1 import replay_pb2
from dase_grpc.schema import TransitionSchema


async def test_a_batch_is_drawn_from_the_whole_buffer(service):
    target = await service.target()
    service.fill(20)
    sampler = await Sampler(target, batch_size=500).open(credits=1)
    batch = await sampler.next()
    assert batch.rows.shape == (500, SCHEMA.width)
    assert batch.buffer_size == 20
    assert set(serials_of(batch.rows)) == set(range(1, 21))
    assert not batch.rows.flags.writeable


async def test_batches_are_those_of_the_runs_seed_the_agent_and_the_number_of_its_stream(service):
    targets = {agent_id: await service.target(agent_id) for agent_id in (0, 1)}
    service.fill(100)
    for agent_id, stream in ((0, 0), (1, 0), (0, 1)):
        sampler = await Sampler(targets[agent_id], batch_size=8).open(credits=2)
        rng = seeding.generator(7, seeding.Purpose.SAMPLING, agent_id, stream)
        for _ in range(2):
            drawn = serials_of((await sampler.next()).rows)
            assert drawn == (rng.integers(100, size=8) + 1).tolist()


async def test_another_seed_draws_other_batches():
    drawn = []
    for seed in (7, 7, 8):
        async with serving(seed=seed) as service:
            target = await service.target()
            service.fill(100)
            sampler = await Sampler(target, batch_size=32).open(credits=1)
            drawn.append(serials_of((await sampler.next()).rows))
            sampler.cancel()
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("grants", [[3], [0, 1, 2], [1, 1, 0, 5]])
async def test_exactly_as_many_batches_come_as_were_granted(service, grants):
    target = await service.target()
    service.fill(10)
    further = [replay_pb2.SampleRequest(credits=credits) for credits in grants[1:]]
    call = await sent(service.stub.Sample(), sample_header(target, credits=grants[0]), *further)
    await call.done_writing()
    assert len(await answers(call)) == sum(grants)


async def test_no_batch_is_drawn_beyond_the_credits_although_the_stream_stays_open(service):
    target = await service.target()
    service.fill(10)
    sampler = await Sampler(target, batch_size=4).open(credits=2)
    sampled = service.run.store.traffic.sampled
    for drawn in (2, 3, 4):
        await eventually(lambda n=drawn: sampled.total() == 4 * n)
        await service.round_trips()
        assert sampled.total() == 4 * drawn
        await sampler.next()
        await sampler.grant(1)


async def test_without_credits_nothing_is_drawn(service):
    target = await service.target()
    service.fill(10)
    sampler = await Sampler(target, batch_size=4).open(credits=0)
    await service.round_trips()
    assert service.run.store.traffic.sampled.total() == 0
    await sampler.grant(1)
    assert len((await sampler.next()).rows) == 4


async def test_a_batch_wider_than_a_frame_comes_in_frames_below_1_mib():
    async with serving() as service:
        target = await service.target(schema=WIDE)
        service.fill(50)
        call = await sent(service.stub.Sample(), sample_header(target, batch_size=100, credits=2))
        await call.done_writing()
        frames = await answers(call)
        sizes = [len(frame.frame.rows) for frame in frames]
        assert sum(sizes) == 2 * 100 * WIDE.row_bytes
        assert max(sizes) == ROWS_BYTES
        assert max(frame.ByteSize() for frame in frames) <= 2**20
        ends = [frame.frame.last for frame in frames]
        assert ends.count(True) == 2
        assert ends[-1]
        assert {frame.frame.buffer_size for frame in frames} == {50}


async def test_the_client_puts_frames_together():
    async with serving() as service:
        target = await service.target(schema=WIDE)
        service.fill(50)
        sampler = await Sampler(target, batch_size=100).open(credits=2)
        rng = seeding.generator(7, seeding.Purpose.SAMPLING, 0, 0)
        for _ in range(2):
            rows = (await sampler.next()).rows
            assert serials_of(rows, WIDE) == (rng.integers(50, size=100) + 1).tolist()


async def test_a_batch_of_exactly_one_frame_is_one_frame():
    schema, batch_size = TransitionSchema("worlds:Fits", 509, 1, (-1.0,), (1.0,)), 256
    assert batch_size * schema.row_bytes == ROWS_BYTES
    async with serving() as service:
        target = await service.target(schema=schema)
        service.fill(3)
        call = await sent(service.stub.Sample(), sample_header(target, batch_size=batch_size, credits=1))
        await call.done_writing()
        (frame,) = await answers(call)
        assert frame.frame.last


async def test_while_transitions_are_missing_the_service_says_how_many():
    async with serving(min_size=10) as service:
        target = await service.target()
        service.fill(4)
        call = await sent(service.stub.Sample(), sample_header(target, credits=1))
        answer = await call.read()
        assert answer.waiting == replay_pb2.SampleWaiting(
            reason="waiting for 6 more transitions (4 of 10)", size=4, min_size=10
        )


async def test_the_wait_ends_as_soon_as_enough_is_there(monkeypatch):
    monkeypatch.setattr("dase_grpc.replay.service.sample.WAITING_EVERY_S", 3600.0)
    async with serving(min_size=10) as service:
        target = await service.target()
        sampler = await Sampler(target, batch_size=4).open(credits=1)
        inserter = await Inserter(target, writer_id="w").open()
        batch = asyncio.ensure_future(sampler.next())
        await inserter.append(rows_of(1, 9))
        await eventually(lambda: sampler.waiting is not None)
        assert not batch.done()
        await inserter.append(rows_of(10, 10))
        assert (await promptly(batch)).buffer_size == 10
        assert sampler.waiting is None


async def test_the_wait_is_repeated_with_the_latest_numbers(monkeypatch):
    monkeypatch.setattr("dase_grpc.replay.service.sample.WAITING_EVERY_S", 0.01)
    async with serving(min_size=10) as service:
        target = await service.target()
        call = await sent(service.stub.Sample(), sample_header(target, credits=1))
        assert (await call.read()).waiting.size == 0
        service.fill(4)
        while (answer := await call.read()).waiting.size == 0:
            pass
        assert answer.waiting.reason == "waiting for 6 more transitions (4 of 10)"


async def test_a_sampler_that_vanishes_while_it_waits_leaves_nothing_behind():
    async with serving(min_size=10) as service:
        before = len(asyncio.all_tasks())
        call = await sent(service.stub.Sample(), sample_header(await service.target(), credits=1))
        await call.read()
        assert len(asyncio.all_tasks()) > before
        call.cancel()
        await eventually(lambda: len(asyncio.all_tasks()) <= before)


async def test_a_batch_of_own_rows_holds_no_others(service):
    targets = {agent_id: await service.target(agent_id) for agent_id in (0, 1)}
    service.fill(50, agent_id=0)
    service.fill(3, agent_id=1)
    for agent_id, target in targets.items():
        sampler = await Sampler(target, batch_size=200, sampling=Sampling(own_rows_only=True)).open(credits=2)
        rng = seeding.generator(7, seeding.Purpose.SAMPLING, agent_id, 0)
        for _ in range(2):
            batch = await sampler.next()
            assert set(SCHEMA.agent_ids(batch.rows).tolist()) == {agent_id}
            assert batch.buffer_size == 53
            assert batch.rows.tobytes() == service.run.store.ring.sample_of(agent_id, 200, rng).tobytes()


async def test_own_rows_are_waited_for_although_others_are_there(monkeypatch):
    monkeypatch.setattr("dase_grpc.replay.service.sample.WAITING_EVERY_S", 3600.0)
    async with serving(min_size=2) as service:
        target = await service.target(1)
        service.fill(5, agent_id=0)
        sampler = await Sampler(target, batch_size=4, sampling=Sampling(own_rows_only=True)).open(credits=1)
        batch = asyncio.ensure_future(sampler.next())
        await eventually(lambda: sampler.waiting is not None)
        assert sampler.waiting == "waiting for a transition of agent 1 (5 of others are present)"
        inserter = await Inserter(target, writer_id="w").open()
        await inserter.append(rows_of(7, 7, 1))
        assert serials_of((await promptly(batch)).rows) == [7] * 4


async def test_what_is_sampled_is_counted_by_the_agents_that_sample_and_that_collected(service):
    target = await service.target(1)
    service.fill(5, agent_id=0)
    service.run.store.append("v", 1, rows_of(1, 5, 1), agent_id=1)
    sampler = await Sampler(target, batch_size=64).open(credits=1)
    own = int(np.count_nonzero(SCHEMA.agent_ids((await sampler.next()).rows) == 1))
    assert service.run.store.traffic.sampled == {(1, 1): own, (1, 0): 64 - own}


async def test_a_sampler_that_is_cancelled_raises_instead_of_waiting(service):
    sampler = await Sampler(await service.target(), batch_size=4).open(credits=0)
    batch = asyncio.ensure_future(sampler.next())
    await service.round_trips(1)
    sampler.cancel()
    with pytest.raises(UnreachableError, match="was cancelled"):
        await promptly(batch)


async def test_describe_says_what_a_client_needs_before_it_joins(service):
    empty = await service.stub.Describe(replay_pb2.DescribeRequest())
    assert (empty.run_id, empty.schema_fingerprint, empty.HasField("schema")) == ("the-run", "", False)
    assert empty.buffer == replay_pb2.BufferState(
        min_size=1, incarnation=service.run.incarnation, buffer_id=service.run.data_id, shard_count=1
    )
    await service.join()
    service.fill(3)
    known = await service.stub.Describe(replay_pb2.DescribeRequest())
    assert known.schema_fingerprint == SCHEMA.fingerprint
    assert known.schema == replay_pb2.Schema(
        environment="worlds:Small", observation_size=2, action_size=1, action_low=[-1], action_high=[1]
    )
    assert known.buffer == replay_pb2.BufferState(
        capacity=1_000,
        size=3,
        min_size=1,
        inserted_total=3,
        size_by_agent={0: 3},
        inserted_by_agent={0: 3},
        incarnation=service.run.incarnation,
        buffer_id=service.run.data_id,
        shard_count=1,
    )


class FramesOf:
    """A stream whose frames a test has written."""

    def __init__(self, *frames: replay_pb2.SampleFrame) -> None:
        self.messages = [replay_pb2.SampleResponse(frame=frame).SerializeToString() for frame in frames]

    async def read(self) -> Frame | Waiting:
        return read_response(self.messages.pop(0))

    async def write(self, message: object) -> None:
        return


def sampler_of(*frames: replay_pb2.SampleFrame, batches_per_frame: int = 1) -> Sampler:
    member = Membership("run", 0, 1, ttl_s=1.0, capacity=10, min_size=1)
    target = StreamTarget(None, "somewhere", member, SCHEMA)
    sampler = Sampler(target, batch_size=2, batches_per_frame=batches_per_frame)
    sampler._stream = FramesOf(*frames)
    return sampler


BATCH = bytes(2 * SCHEMA.row_bytes)


@pytest.mark.parametrize(
    "frames",
    [
        [replay_pb2.SampleFrame(rows=BATCH[:-4], last=True)],
        [replay_pb2.SampleFrame(rows=BATCH + b"more", last=True)],
        [replay_pb2.SampleFrame(rows=BATCH), replay_pb2.SampleFrame(rows=BATCH)],
    ],
    ids=["too short", "too long", "without end"],
)
async def test_a_batch_of_another_size_than_asked_for_is_an_error(frames):
    sampler = sampler_of(*frames)
    await sampler.grant(5)
    with pytest.raises(DaseError, match="not asked for"):
        await sampler.next()


async def test_a_batch_beyond_the_credits_is_an_error():
    frame = replay_pb2.SampleFrame(rows=BATCH, last=True)
    sampler = sampler_of(frame, frame)
    await sampler.grant(1)
    await sampler.next()
    with pytest.raises(DaseError, match="not asked for"):
        await sampler.next()


# --- several batches in a frame ----------------------------------------------------------------------------


async def test_batches_granted_together_may_share_a_frame_and_are_those_of_frames_of_their_own(service):
    targets = {agent_id: await service.target(agent_id) for agent_id in (0, 1)}
    service.fill(100)
    for agent_id, target in targets.items():
        sampler = await Sampler(target, batch_size=8, batches_per_frame=3).open(credits=7)
        rng = seeding.generator(7, seeding.Purpose.SAMPLING, agent_id, 0)
        for _ in range(7):
            batch = await promptly(sampler.next())
            assert serials_of(batch.rows) == (rng.integers(100, size=8) + 1).tolist()
            assert (batch.buffer_size, batch.drawn_from) == (100, 100)


@pytest.mark.parametrize(
    ("options", "batches"),
    [
        ({"batches_per_frame": 3}, [3, 3, 1]),
        ({}, [1] * 7),
        ({"own_rows_only": True}, [1] * 7),
    ],
    ids=["three at once", "not asked for", "own rows"],
)
async def test_as_many_batches_share_a_frame_as_the_client_says(service, options, batches):
    target = await service.target()
    service.fill(10)
    call = service.stub.Sample()
    request = sample_header(target, batch_size=4, credits=7)
    for name, value in options.items():
        setattr(request.header, name, value)
    await call.write(request)
    await call.done_writing()
    frames = [answer.frame for answer in await answers(call)]
    assert [len(frame.rows) // (4 * SCHEMA.row_bytes) for frame in frames] == batches
    assert all(frame.last for frame in frames)


async def test_no_more_batches_share_a_frame_than_fit():
    async with serving() as service:
        target = await service.target(schema=WIDE)
        service.fill(50)
        fitting = ROWS_BYTES // (10 * WIDE.row_bytes)
        sampler = await Sampler(target, batch_size=10, batches_per_frame=2**20).open(credits=fitting + 1)
        rng = seeding.generator(7, seeding.Purpose.SAMPLING, 0, 0)
        for _ in range(fitting + 1):
            rows = (await promptly(sampler.next())).rows
            assert serials_of(rows, WIDE) == (rng.integers(50, size=10) + 1).tolist()


@pytest.mark.parametrize(("count", "credits"), [(3, 5), (2, 1)], ids=["in a frame", "granted"])
async def test_more_batches_in_a_frame_than_are_taken_are_an_error(count, credits):
    sampler = sampler_of(replay_pb2.SampleFrame(rows=count * BATCH, last=True), batches_per_frame=2)
    await sampler.grant(credits)
    with pytest.raises(DaseError, match="not asked for"):
        await sampler.next()
