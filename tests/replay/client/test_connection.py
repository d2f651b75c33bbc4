"""Connection: what a stream's end means, how long a replay may be away, and one that came back empty."""

import asyncio
import random
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
from contracts.sentences import assert_one_sentence
from nodes.running import replay_node
from replay.wire.services import SCHEMA, another_epoch, eventually, promptly, serving

from dase_grpc.errors import (
    BufferGoneError,
    ConfigError,
    DrainingError,
    MalformedError,
    OverloadedError,
    SchemaMismatchError,
    StaleLeaseError,
    UnreachableError,
)
from dase_grpc.metrics.endpoint import make_registry
from dase_grpc.metrics.nodes import LearnerMetrics
from dase_grpc.pace import Backoff
from dase_grpc.progress import Progress
from dase_grpc.replay.client.cluster import ClusterClient, StreamTarget, open_channel
from dase_grpc.replay.client.connection import Away, Outage, Stream
from dase_grpc.replay.client.handoff import Times, WaitReason
from dase_grpc.replay.client.membership import LearnerConnection
from dase_grpc.replay.client.patience import NODE_NAME

SILENT = UnreachableError("no answer")
FOREVER_S = 600.0
USUAL = {"timeout_s": FOREVER_S, "rng": random.Random(1), "timing": Times(beat_s=0.01)}


@pytest.fixture(autouse=True)
def pauses(monkeypatch):
    """The pauses that were made, none of which takes any time."""
    made, sleep = [], asyncio.sleep

    async def at_once(seconds):
        made.append(seconds)
        await sleep(0)

    monkeypatch.setattr(
        "dase_grpc.replay.client.connection.asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": at_once})
    )
    return made


class Scripted:
    """A stream that ends by a script; the last entry is repeated; None ends well."""

    def __init__(self, connection, *ends, up=()):
        self.connection, self.ends, self.up = connection, list(ends), up
        self.targets = []

    async def once(self, target):
        self.targets.append(target)
        if len(self.targets) in self.up:
            self.connection.up(Stream.INSERT)
        end = self.ends.pop(0) if len(self.ends) > 1 else self.ends[0]
        if end is not None:
            raise end

    async def run(self):
        await promptly(self.connection.keep(Stream.INSERT, self.once))


async def connection_to(service, **options):
    return LearnerConnection(await service.target(), **{**USUAL, **options})


def test_pauses_grow_up_to_a_cap_differ_between_nodes_and_begin_anew():
    backoff, other = Backoff(random.Random(1)), Backoff(random.Random(2))
    made = [backoff.next_s() for _ in range(200)]
    assert made != [other.next_s() for _ in range(200)]
    assert all(pause <= min(0.1 * 2**k, 2.0) for k, pause in enumerate(made))
    assert 0.8 < sum(made[10:]) / 190 < 1.2
    assert max(made) > 1.9
    backoff.reset()
    assert backoff.next_s() <= 0.1


async def test_a_stream_whose_connection_breaks_begins_again_until_it_ends_well(service, pauses):
    connection = await connection_to(service)
    drained = ExceptionGroup("", [SILENT, DrainingError("shutting down")])
    stream = Scripted(connection, SILENT, ExceptionGroup("", [SILENT]), drained, None, up=(4,))
    await stream.run()
    assert len(stream.targets) == 4
    assert len(pauses) == 3
    assert connection.outage is None


@pytest.mark.parametrize(
    "end",
    [
        MalformedError("nonsense"),
        ExceptionGroup("", [SILENT, MalformedError("nonsense")]),
        SchemaMismatchError("another world"),
        ZeroDivisionError("a bug"),
        ExceptionGroup("", [SILENT, ZeroDivisionError("a bug")]),
    ],
    ids=["refused", "refused in a group", "mismatch", "bug", "bug in a group"],
)
async def test_what_no_new_attempt_would_put_right_is_raised_at_once(service, end, pauses):
    stream = Scripted(await connection_to(service), end)
    with pytest.raises((MalformedError, SchemaMismatchError, ZeroDivisionError)):
        await stream.run()
    assert pauses == []


async def test_a_stream_that_is_cancelled_while_it_breaks_does_not_begin_again(service):
    """A task group forgets that it was cancelled when one of its tasks fails at the same moment."""
    connection, begun = await connection_to(service), []

    async def once(target):
        begun.append(target)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise SILENT from None

    keeping = asyncio.ensure_future(connection.keep(Stream.INSERT, once))
    await eventually(lambda: len(begun) == 1)
    keeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await promptly(keeping)
    assert len(begun) == 1


async def test_a_replay_that_is_away_for_too_long_is_given_up(service):
    connection = await connection_to(service, timeout_s=0.05)
    with pytest.raises(UnreachableError, match="gave up after") as caught:
        await Scripted(connection, SILENT).run()
    assert_one_sentence(caught.value, "no answer")


async def test_without_a_timeout_the_first_failure_ends_the_stream(service, pauses):
    connection = LearnerConnection(await service.target())
    with pytest.raises(UnreachableError, match=r"^no answer$"):
        await Scripted(connection, SILENT).run()
    assert pauses == []


async def test_a_learner_that_stops_gives_a_draining_replay_up_at_once_and_a_silent_one_soon(
    service, monkeypatch
):
    target = await service.target()
    for error in (DrainingError("shutting down"), SILENT):
        connection = LearnerConnection(target, timeout_s=FOREVER_S, timing=Times(stopping_s=0.05))
        connection.note_stopping()
        with pytest.raises(type(error)):
            await Scripted(connection, error).run()


async def test_an_outage_lasts_until_the_last_of_its_streams_is_answered_and_says_why(service, caplog):
    metrics = LearnerMetrics(registry := make_registry(), 0)
    connection = await connection_to(service, metrics=metrics)
    ends = {Stream.INSERT: SILENT, Stream.SAMPLE: DrainingError("shutting down")}
    release = asyncio.Event()

    async def broken_once(stream, target):
        if stream in ends:
            raise ends.pop(stream)
        await release.wait()
        connection.up(stream)

    async with asyncio.TaskGroup() as tasks:
        for stream in tuple(ends):
            tasks.create_task(connection.keep(stream, lambda target, s=stream: broken_once(s, target)))
        await eventually(lambda: not ends and connection.outage is not None)
        assert connection.outage.why is Away.DRAINED
        connection.up(Stream.SAMPLE)
        assert connection.outage.why is Away.UNREACHABLE
        assert connection.away is None  # not for long enough
        release.set()
    assert connection.outage is None
    assert caplog.text.count("trying again for up to 600 s") == 1
    assert caplog.text.count("answers again") == 1
    for stream in (Stream.INSERT, Stream.SAMPLE):
        labels = {"agent_id": "0", "stream": stream, "grpc_code": "UNAVAILABLE"}
        assert registry.get_sample_value("dase_learner_reconnects_total", labels) == 1


async def test_a_stream_that_goes_on_is_counted_by_the_status_it_had_first_broken_with(service, pauses):
    metrics = LearnerMetrics(registry := make_registry(), 0)
    connection = await connection_to(service, metrics=metrics)
    ends = [OverloadedError("full"), SILENT]

    async def broken_twice(target):
        if ends:
            raise ends.pop(0)
        connection.up(Stream.SAMPLE)

    await connection.keep(Stream.SAMPLE, broken_twice)
    labels = {"agent_id": "0", "stream": "sample", "grpc_code": "RESOURCE_EXHAUSTED"}
    assert registry.get_sample_value("dase_learner_reconnects_total", labels) == 1


@pytest.mark.parametrize(
    ("errors", "told"),
    [
        ([SILENT], "has not answered for 60 s"),
        ([OverloadedError("2048 calls are open")], "has been overloaded for 60 s"),
        ([SILENT, OverloadedError("2048 calls are open")], "has been overloaded for 60 s"),
        ([OverloadedError("2048 calls are open"), SILENT], "has not answered for 60 s"),
        ([DrainingError("shutting down"), SILENT], "shut down 60 s ago"),
        (
            [DrainingError("shutting down"), OverloadedError("2048 calls are open")],
            "has been overloaded for 60 s",
        ),
    ],
)
def test_an_outage_is_told_by_what_the_replay_said_last_and_silence_follows_a_shutdown(
    monkeypatch, errors, told
):
    outage = Outage(100.0, Away.of(errors[0]))
    for error in errors:
        outage = outage.next(Away.of(error))
    monkeypatch.setattr("dase_grpc.replay.client.connection.time", SimpleNamespace(monotonic=lambda: 160.0))
    assert str(outage) == told
    assert WaitReason(outage.why.value)


async def test_a_lease_that_another_node_has_is_the_end(service, pauses):
    target = await service.target()
    service.clock.now += 100
    service.run.leases.join("usurper", 0, service.clock.now)
    connection = LearnerConnection(target, **USUAL)
    with pytest.raises(StaleLeaseError, match="fenced off: agent 0 belongs to another") as caught:
        await promptly(connection.heartbeats(Progress))
    assert_one_sentence(caught.value, "usurper")
    assert pauses == []


async def test_heartbeats_renew_a_lease_whatever_its_age_while_nobody_has_the_id(service):
    connection = await connection_to(service)
    service.clock.now += 1_000
    async with beating(connection):
        await eventually(lambda: service.run.leases.all()[0].state(service.clock.now) == "live")
    assert service.run.leases.all()[0].epoch == 1


@asynccontextmanager
async def beating(connection):
    """Its heartbeats go on within the block."""
    task = asyncio.ensure_future(connection.heartbeats(Progress))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def came_back_empty(size=7, **options):
    """A connection to a replay in memory that was started again, and the run there."""
    async with serving() as first:
        target = await first.target()
        target = replace(target, member=replace(target.member, node_id="this node"))
        first.fill(size)
        connection = LearnerConnection(target, **{**USUAL, **options})
        async with beating(connection):
            await eventually(lambda: connection.buffer_size == size)
    async with serving() as second, open_channel(second.address) as channel:
        connection.target = StreamTarget(channel, str(second.address), target.member, SCHEMA)
        yield connection, second


async def test_a_replay_that_came_back_without_its_data_is_joined_again_once_for_all_streams(caplog):
    metrics, restarts = LearnerMetrics(registry := make_registry(), 0), []
    async with came_back_empty(metrics=metrics) as (connection, service):
        old = connection.target
        connection.on_restart(lambda: restarts.append(connection.incarnation))

        async def stream(target):
            await target.cluster.heartbeat(target.member, Progress())

        await promptly(
            asyncio.gather(*(connection.keep(each, stream) for each in (Stream.INSERT, Stream.SAMPLE)))
        )
        assert service.events == [
            f"{NODE_NAME} joined as agent 0 (epoch 1); it comes from buffer {old.member.buffer_id}, whose "
            f"transitions are not here any more"
        ]
        assert connection.target.member.buffer_id == service.run.data_id != old.member.buffer_id
        assert (connection.losses, restarts) == (1, [service.run.incarnation])
    (said,) = [record.getMessage() for record in caplog.records if "came back" in record.getMessage()]
    for part in (old.member.incarnation, service.run.incarnation, "the 7 transitions of the run"):
        assert part in said
    assert registry.get_sample_value("dase_learner_replay_losses_total", {"agent_id": "0"}) == 1


async def test_an_old_lease_is_no_lease_of_a_replay_that_came_back_though_its_epoch_is_the_same():
    async with came_back_empty() as (connection, service):
        usurper = await service.join(0)
        assert usurper.epoch == connection.target.member.epoch
        with pytest.raises(BufferGoneError):
            await service.client.heartbeat(connection.target.member, Progress())
        with pytest.raises(BufferGoneError):
            await service.client.leave(connection.target.member, reason="old")
        with pytest.raises(StaleLeaseError, match="fenced off"):
            await promptly(connection.heartbeats(Progress))
        assert service.run.leases.all()[0].left_because is None


async def test_a_membership_that_does_not_fit_any_more_ends_the_learner():
    def refuse(member):
        raise ConfigError("too small now")

    async with came_back_empty(accept=refuse) as (connection, _):
        with pytest.raises(ConfigError, match="too small now"):
            await promptly(connection.heartbeats(Progress))


async def test_a_replay_that_vanishes_while_it_is_joined_again_is_ridden_out():
    async with came_back_empty(timeout_s=0.2) as (connection, service):
        service.cluster.draining = True
        async with beating(connection):
            await eventually(lambda: connection.outage is not None)
            service.cluster.draining = False
            await eventually(lambda: connection.outage is None)
            assert connection.losses == 1


async def test_a_replay_that_is_joined_again_without_hearing_the_answer_gives_the_same_lease_again(
    monkeypatch,
):
    async with came_back_empty() as (connection, service):
        joined, join = [], service.run.join

        def unheard_once(*arguments, **named):
            joined.append(join(*arguments, **named))
            if len(joined) == 1:
                raise UnreachableError("the answer was lost")
            return joined[-1]

        monkeypatch.setattr(service.run, "join", unheard_once)
        async with beating(connection):
            await eventually(lambda: connection.losses == 1 and connection.outage is None)
        assert [lease.epoch for lease in joined] == [1, 1]


async def test_a_restart_that_kept_the_data_is_said_and_is_no_loss(tmp_path, caplog):
    async with replay_node(data_dir=tmp_path) as replay, open_channel(replay.address) as channel:
        address = replay.address
        member = await ClusterClient(channel, str(address)).join(node_name="n", schema=SCHEMA, agent_id=0)
        connection = LearnerConnection(StreamTarget(channel, str(address), member, SCHEMA), **USUAL)
        async with beating(connection):
            await eventually(lambda: connection.buffer_size == 0 and connection.outage is None)
            await replay.end()
            await eventually(lambda: connection.outage is not None)
            async with replay_node(data_dir=tmp_path, listen=address):
                await eventually(lambda: "was started again" in caplog.text)
                assert (connection.losses, connection.target.member) == (0, member)


async def test_another_epoch_stays_fenced_by_a_buffer_that_outlives_the_replay(service):
    target = another_epoch(await service.target(), 5)
    with pytest.raises(StaleLeaseError, match="fenced off"):
        await promptly(LearnerConnection(target, timeout_s=FOREVER_S).heartbeats(Progress))
