"""Insert frames that a hand-written client doubles, reorders, cuts off and sends by two streams at once."""

import asyncio
import random

import grpc
import pytest
from nodes.running import joined, replay_node
from replay.wire.services import END, acknowledged, chunk, insert_header, refusal, rows_of, sent, serials_of

from dase_grpc.process.ends import boot_id
from dase_grpc.replay.buffer.directory import DataDirectory
from dase_grpc.replay.buffer.durable import DurableStore
from dase_grpc.replay.wire.v1 import replay_pb2_grpc


class Writer:
    """A client that opens streams as it likes, all of one writer."""

    def __init__(self, target):
        self.target = target
        self.stub = replay_pb2_grpc.ReplayServiceStub(target.channel)

    async def open(self):
        """A new stream, and what is committed."""
        call = await sent(self.stub.Insert(), insert_header(self.target))
        return call, (await call.read()).committed_seq


async def test_doubled_and_overlapping_frames_are_stored_once(service):
    writer = Writer(await service.target())
    call, committed = await writer.open()
    assert committed == 0
    frames = ((1, 3), (1, 3), (2, 5), (5, 5), (1, 9), (4, 6))
    await sent(call, *(chunk(first, rows_of(first, last)) for first, last in frames))
    await acknowledged(call, 9)
    call.cancel()
    assert service.stored() == [*range(1, 10)]


async def test_a_frame_that_overtook_another_is_refused_and_nothing_of_it_is_stored(service):
    writer = Writer(await service.target())
    call, _ = await writer.open()
    await sent(call, chunk(1, rows_of(1, 3)), chunk(6, rows_of(6, 8)))
    code, sentence = await refusal(call)
    assert (code, service.stored()) == (grpc.StatusCode.OUT_OF_RANGE, [1, 2, 3])
    assert "resend from 4" in sentence
    call, committed = await writer.open()
    assert committed == 3


async def test_two_streams_of_one_writer_that_are_open_at_once_store_each_row_once(service):
    """As when a connection that was given up for dead still delivers."""
    writer = Writer(await service.target())
    (old, _), (new, committed) = await writer.open(), await writer.open()
    assert committed == 0
    await old.write(chunk(1, rows_of(1, 4)))
    await acknowledged(old, 4)
    await new.write(chunk(1, rows_of(1, 2)))
    await acknowledged(new, 4)
    await new.write(chunk(3, rows_of(3, 7)))
    await acknowledged(new, 7)
    await old.write(chunk(5, rows_of(5, 6)))
    await old.write(END)
    assert (await acknowledged(old, 7)).committed_seq == 7
    assert service.stored() == [*range(1, 8)]
    new.cancel()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.slow
async def test_any_mixture_of_breaks_doubles_and_restarts_of_the_service_stores_each_row_once(tmp_path, seed):
    rng, last = random.Random(seed), 300
    data = {"data_dir": tmp_path / "data"}
    latest = 0
    async with replay_node(**data) as replay, joined(replay.address) as target:
        address, writer = replay.address, Writer(target)
        await replay.end()
        while latest < last:
            async with replay_node(**data, listen=address):
                await target.channel.channel_ready()
                for _ in range(rng.randint(1, 4)):
                    call, committed = await writer.open()
                    assert committed <= latest
                    chunks = rng.randint(0, 6)
                    for _ in range(chunks):
                        first = rng.randint(1, committed + 1)
                        until = rng.randint(first, first + 20)
                        await call.write(chunk(first, rows_of(first, until)))
                        committed, latest = max(committed, until), max(latest, until)
                    if chunks and rng.random() < 0.4:
                        while (await call.read()).committed_seq < committed:
                            pass
                    if rng.random() < 0.5:
                        await call.done_writing()  # a bare end of the stream
                        while await call.read() is not grpc.aio.EOF:
                            pass
                    call.cancel()
                    await asyncio.sleep(0)
    directory = DataDirectory.open(tmp_path / "data")
    store = DurableStore.open(directory, directory.identity(), boot_id=boot_id())
    stored = serials_of(store.ring.ordered())
    assert stored == [*range(1, store.committed("w", agent_id=0) + 1)]
    assert len(stored) > 0
    store.abandon()
    directory.close()
