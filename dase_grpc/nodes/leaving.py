"""How a learner gives its leases back."""

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from dase_grpc.errors import RefusalError
from dase_grpc.progress import Progress
from dase_grpc.replay.client.inserter import StreamTarget
from dase_grpc.replay.service.cluster import ClusterClient

FAREWELL_S: Final = 2.0
"""How long a replay may take for each call."""

log = logging.getLogger("dase")


@dataclass
class Farewell:
    """What a learner says when it gives its leases back, unless these or the replay are gone.

    Attributes:
        targets: the replay, or its shards in their order.
    """

    targets: Sequence[StreamTarget]
    reason: str = "failed"
    progress: Progress | None = None
    nothing_to_give_back: bool = False


@asynccontextmanager
async def leases(targets: Sequence[StreamTarget]) -> AsyncIterator[Farewell]:
    """Gives the leases back at the end of the block, however it ends, if somebody is there to take them.

    Of several shards one may be gone and the others there, so each is tried.
    """
    farewell = Farewell(targets)
    try:
        yield farewell
    finally:
        if not farewell.nothing_to_give_back or len(farewell.targets) > 1:
            await leave(farewell)


async def leave(farewell: Farewell) -> None:
    """Leaves each shard, the first one last, so that whoever gets its lease finds the others free."""
    for target in reversed(farewell.targets):
        cluster = ClusterClient(target.channel, target.address)
        try:
            if farewell.progress is not None:
                await cluster.heartbeat(target.member, farewell.progress, timeout_s=FAREWELL_S)
            await cluster.leave(target.member, reason=farewell.reason, timeout_s=FAREWELL_S)
        except RefusalError as error:
            log.info("could not give the lease back: %s", error)
