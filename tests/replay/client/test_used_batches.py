"""What a paced service is told of batches that were used, and Status of waits, while the thread goes on."""

import asyncio
from types import SimpleNamespace

from replay.wire.services import SCHEMA

from dase_grpc.errors import Halted
from dase_grpc.replay.buffer.sampling import UNIFORM
from dase_grpc.replay.client.handoff import USUAL, Wait, Waited, WaitReason
from dase_grpc.replay.client.sample import OneFetcher
from dase_grpc.replay.client.session import Session

GRANTS = 4


class TakenAtEachLook:
    """A queue of batches from which the compute thread takes one as soon as its count was read."""

    portion = 1
    delivered = 0

    def __init__(self):
        self.moved = asyncio.Event()
        self.last_read = -1

    @property
    def taken(self):
        self.last_read += 1
        return self.last_read

    def due(self, granted):
        return 1


async def test_each_batch_that_was_used_is_told_once_though_the_thread_takes_more_meanwhile():
    queue, told = TakenAtEachLook(), []

    async def tell(errors):
        pass

    async def grant(credits, *, used, again):
        told.append(used)
        if len(told) == GRANTS:
            raise Halted

    fetcher = OneFetcher(None, queue, 1, UNIFORM, pacing=lambda taken, held: None)
    granting = asyncio.ensure_future(fetcher._grant(SimpleNamespace(tell=tell, grant=grant), 0))
    await asyncio.wait({granting})
    assert isinstance(granting.exception(), Halted)
    assert sum(told) == queue.last_read


def test_a_wait_that_ends_while_a_session_says_how_it_is_is_no_bug():
    class Link:
        stored = 3
        waits = iter([Wait(Waited(USUAL), WaitReason.BATCH, "waiting for a batch"), None])

        @property
        def wait(self):
            return next(self.waits)

    session = Session("127.0.0.1:1", schema=SCHEMA)
    session._joined.set_result(SimpleNamespace(link=Link()))
    shown = session._shown()
    assert (shown.step, shown.state) == (3, "waiting: a batch")
