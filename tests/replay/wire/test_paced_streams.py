"""A service that keeps a pace: whichever of an agent's steps and updates is ahead waits for the other."""

import asyncio

import pytest
from replay.wire.services import acknowledged, chunk, eventually, insert_header, promptly, rows_of, sent

from dase_grpc.errors import MalformedError
from dase_grpc.pace import Pace, StepLimiter
from dase_grpc.progress import Attendance, Attendant
from dase_grpc.replay.client.sample import Pacing, Sampler
from dase_grpc.replay.service.sample import PacedBatches
from dase_grpc.replay.service.streams import Changes
from dase_grpc.replay.wire.v1 import replay_pb2


def paced(*, first=5, error=4, ratio=1.0, used=0, held=0):
    return Pacing(Pace(ratio, error, first_steps=first), used, held)


def collected(service):
    return service.run.store.traffic.inserted[0]


async def opened(target, *, credits=2, **pace):
    return await Sampler(target, batch_size=2).open(credits=credits, pacing=paced(**pace))


async def inserting(service, target, rows, *, writer="actor-1", paced=True):
    header = insert_header(target, writer)
    header.header.paced = paced
    call = await sent(service.stub.Insert(), header)
    await call.read()
    await call.write(chunk(1, rows))
    return call


async def test_rows_beyond_the_error_buffer_wait_for_updates_and_are_stored_as_these_come(service):
    target = await service.target()
    sampler = await opened(target)
    call = await inserting(service, target, rows_of(1, 20))
    await eventually(lambda: collected(service) == 8)  # 4 before the first update, and 4 more
    answer = await call.read()
    while not answer.waiting:
        answer = await promptly(call.read())
    assert "waiting for updates of agent 0" in answer.waiting
    for used in range(1, 9):
        await promptly(sampler.next())
        await service.round_trips(2)
        assert collected(service) == 7 + used
        await sampler.grant(1, used=1)
        await eventually(lambda count=8 + used: collected(service) == count)


async def test_batches_that_were_only_sent_ahead_make_no_room(service):
    target = await service.target()
    sampler = await opened(target, credits=4)
    call = await inserting(service, target, rows_of(1, 20))
    for _ in range(4):
        await promptly(sampler.next())
    await service.round_trips()
    assert collected(service) == 8
    call.cancel()


@pytest.mark.slow
async def test_a_batch_waits_for_steps_and_says_for_how_many_or_that_there_is_no_actor(service):
    target = await service.target()
    sampler = await opened(target)
    asking = asyncio.ensure_future(sampler.next())
    await eventually(lambda: sampler.waiting is not None)
    assert sampler.waiting == (
        "waiting for an actor of agent 0: start one with `dase node --role actor --agent 0`"
    )
    await service.client.attend(Attendant("n", "actor@x", "actor", 0), Attendance())
    call = await inserting(service, target, rows_of(1, 2))
    await eventually(lambda: "3 more environment steps" in (sampler.waiting or ""))
    await call.write(chunk(3, rows_of(3, 5)))
    await promptly(asking)
    second = asyncio.ensure_future(sampler.next())
    await service.round_trips()
    assert not second.done()


async def test_charges_are_heard_while_a_batch_waits(service):
    target = await service.target()
    sampler = await opened(target, credits=64, first=1, error=2)
    call = await inserting(service, target, rows_of(1, 30))
    for _ in range(25):  # with 64 credits open the service always owes a batch
        await promptly(sampler.next())
        await sampler.grant(1, used=1)
    assert 25 <= collected(service) <= 27
    call.cancel()


async def test_a_learner_that_comes_back_goes_on_from_what_its_updates_have_taken(service):
    target = await service.target()
    first = await opened(target)
    call = await inserting(service, target, rows_of(1, 40))
    await eventually(lambda: collected(service) == 8)
    first.cancel()
    again = await opened(target, credits=5, used=6, held=1)
    await eventually(lambda: collected(service) == 14)
    for _ in range(3):
        await promptly(again.next())
    third = asyncio.ensure_future(again.next())
    await service.round_trips()
    assert not third.done()
    third.cancel()
    call.cancel()


async def test_a_paced_writer_stores_nothing_before_the_learner_has_said_its_pace(service):
    target = await service.target()
    call = await inserting(service, target, rows_of(1, 3))
    answer = await promptly(call.read())
    assert answer.waiting == "waiting for the learner of agent 0 to say its pace"
    assert collected(service) == 0
    sampler = await opened(target)
    await acknowledged(call, 3)
    call.cancel()
    sampler.cancel()


async def test_rows_that_are_sent_again_are_acknowledged_at_once_although_no_more_may_be_stored(service):
    target = await service.target()
    sampler = await opened(target)
    first = await inserting(service, target, rows_of(1, 20))
    await eventually(lambda: collected(service) == 8)
    first.cancel()
    call = await sent(service.stub.Insert(), insert_header(target, "actor-1"))
    assert (await call.read()).committed_seq == 8
    await call.write(chunk(5, rows_of(5, 20)))
    await service.round_trips()
    assert collected(service) == 8
    await promptly(sampler.next())
    await sampler.grant(1, used=1)
    await acknowledged(call, 9)


async def test_another_learner_without_a_pace_lets_all_rows_in(service):
    target = await service.target()
    sampler = await opened(target)
    call = await inserting(service, target, rows_of(1, 20), paced=False)
    await eventually(lambda: collected(service) == 8)
    sampler.cancel()
    other = await Sampler(target, batch_size=2).open(credits=0)
    await eventually(lambda: collected(service) == 20)
    call.cancel()
    other.cancel()


async def test_a_pace_that_could_stand_still_and_charges_for_nothing_are_refused(service):
    target = await service.target()
    header = replay_pb2.SampleHeader(stream=target.header(), batch_size=2)
    header.pace.updates_per_step, header.pace.step_error_buffer, header.pace.first_steps = 1.0, 1, 1
    call = service.stub.Sample()
    await call.write(replay_pb2.SampleRequest(header=header, credits=1))
    with pytest.raises(Exception, match="would wait for each other"):
        await promptly(call.read())
    sampler = await opened(target)
    await sampler.grant(1, used=1)
    with pytest.raises(MalformedError, match="cannot have taken 1 batches"):
        await promptly(sampler.next())


class Interrupted:
    """A stream on which steps come in while the service says that it waits for them."""

    header = replay_pb2.SampleHeader(batch_size=2)
    agent_id = 3
    again = 0

    def __init__(self):
        self.context = self
        self.changed = Changes()
        self.enough = False
        self.drawn = asyncio.Event()

    async def write(self, _):
        self.enough = True
        self.changed.tell(self.agent_id)
        await asyncio.sleep(0)

    async def read(self):
        await asyncio.Event().wait()

    def why_no_batch(self, _):
        return None if self.enough else "steps"

    def require_valid(self):
        pass

    def take(self, request):
        assert not request.priorities

    async def send(self, _):
        self.drawn.set()


async def test_steps_that_come_between_a_look_and_its_wait_are_not_waited_for(monkeypatch):
    monkeypatch.setattr("dase_grpc.replay.service.sample.WAITING_EVERY_S", 60.0)
    stream = Interrupted()
    batches = PacedBatches(stream, stream, StepLimiter(Pace(1.0, 4)), stream.changed)
    serving = asyncio.ensure_future(batches.serve(replay_pb2.SampleRequest(credits=1)))
    await promptly(stream.drawn.wait())
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
