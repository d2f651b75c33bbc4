"""One Subscribe stream of a node: the policies that arrive on it are handed over as they come."""

from collections.abc import Callable, Collection

from dase_grpc.replay.buffer.policies import Policy
from dase_grpc.replay.client.connection import Connection, Stream
from dase_grpc.replay.client.inserter import StreamTarget
from dase_grpc.replay.service.policies import PolicySubscriber


async def follow(connection: Connection, agent_ids: Collection[int], take: Callable[[Policy], None]) -> None:
    """Calls `take` with each policy of these agents that arrives, until cancelled.

    Begins again when the stream breaks.

    Raises:
        RefusalError: see Connection.keep.
    """

    async def receive(target: StreamTarget) -> None:
        subscriber = PolicySubscriber(
            target.channel,
            target.address,
            run_id=target.member.run_id,
            schema_fingerprint=target.schema.fingerprint,
            agent_ids=agent_ids,
        )
        try:
            await subscriber.open()
            connection.up(Stream.SUBSCRIBE)
            async for policy in subscriber:
                take(policy)
        finally:
            subscriber.cancel()

    await connection.keep(Stream.SUBSCRIBE, receive)
