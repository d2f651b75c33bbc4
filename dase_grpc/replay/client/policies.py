"""Policies out and in, as bytes: published, and subscribed to."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Final, Self

from grpc.aio import Channel

from dase_grpc.errors import DaseError, MalformedError
from dase_grpc.replay.buffer.policies import IncomingPolicy, Policy, require_size
from dase_grpc.replay.client.cluster import UNARY_TIMEOUT_S, StreamTarget
from dase_grpc.replay.client.connection import Connection, Stream
from dase_grpc.replay.client.streams import ClientStream, ClientUpload, opened_in_time
from dase_grpc.replay.wire.limits import CHUNK_BYTES
from dase_grpc.replay.wire.v1 import policy_pb2, policy_pb2_grpc

PUBLISH_TIMEOUT_S: Final = 60.0
"""How long one policy may take to be published, the wait for a connection included."""


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


class PolicyPublisher:
    """Publishes the policies of one agent, one at a time."""

    def __init__(self, target: StreamTarget) -> None:
        self._target = target
        self._stub = policy_pb2_grpc.PolicyServiceStub(target.channel)

    async def publish(
        self, version: int, payload: bytes, *, step: int = 0, timeout_s: float = PUBLISH_TIMEOUT_S
    ) -> int:
        """Makes a policy the agent's latest; returns the version that subscribers get now.

        `step` is how many environment steps the agent has had.

        Waits for the connection if need be. Safe to repeat with the same version and bytes; cancelling
        it leaves the policy as it was or as it shall be.

        Raises:
            StalePolicyError: a newer one, or another one of this version, was published.
            RefusalError: any other refusal; UnreachableError also when `timeout_s` have passed.
        """
        require_size(len(payload))
        member = self._target.member
        policy = Policy.of(payload, agent_id=member.agent_id, epoch=member.epoch, version=version)
        header = policy_pb2.PublishHeader(
            stream=self._target.header(),
            version=version,
            size=len(payload),
            sha256=policy.sha256,
            step=step,
        )
        stream = ClientUpload(
            self._stub.Publish(timeout=timeout_s, wait_for_ready=True), self._target.address
        )
        try:
            await stream.write(policy_pb2.PublishRequest(header=header))
            for start in range(0, len(payload), CHUNK_BYTES):
                await stream.write(policy_pb2.PublishRequest(chunk=payload[start : start + CHUNK_BYTES]))
            await stream.end_writing()
            answer = await stream.answer()
        finally:
            stream.cancel()
        return int(answer.latest_version)


class PolicySubscriber:
    """One Subscribe stream: the latest policy of each wanted agent, and then each newer one.

    An async iterator that ends only by an error. All methods raise the refusals of errors.py when the
    stream breaks, and DaseError when the service sends what was not asked for or not what it announced.
    """

    def __init__(
        self,
        channel: Channel,
        address: str,
        *,
        run_id: str,
        schema_fingerprint: str,
        agent_ids: Collection[int] = (),
    ) -> None:
        self._stub = policy_pb2_grpc.PolicyServiceStub(channel)
        self._address = address
        self._request = policy_pb2.SubscribeRequest(
            run_id=run_id, schema_fingerprint=schema_fingerprint, agent_ids=sorted(agent_ids)
        )
        self._stream: ClientStream | None = None

    async def open(self) -> Self:
        """Starts the stream; waits for the connection."""
        call = self._stub.Subscribe(self._request, wait_for_ready=True)
        self._stream = stream = ClientStream(call, self._address)
        async with opened_in_time(stream, self._address, UNARY_TIMEOUT_S):
            await stream.connected()
        return self

    async def next(self) -> Policy:
        """The next policy; waits for it. Policies between two calls may have been skipped."""
        if self._stream is None:
            raise TypeError("the stream has not been opened")
        incoming = self._announced(await self._stream.read())
        while not incoming.whole:
            answer = await self._stream.read()
            with self._sent_right():
                incoming.add(answer.chunk)
        with self._sent_right():
            return incoming.finish()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Policy:
        return await self.next()

    def cancel(self) -> None:
        """Ends the stream; has no effect once it has ended."""
        if self._stream is not None:
            self._stream.cancel()

    def _announced(self, answer: policy_pb2.SubscribeResponse) -> IncomingPolicy:
        header, wanted = answer.header, self._request.agent_ids
        with self._sent_right():
            if not answer.HasField("header") or (wanted and header.agent_id not in wanted):
                raise MalformedError("it was not asked for")
            return IncomingPolicy(
                agent_id=header.agent_id,
                epoch=header.lease_epoch,
                version=header.version,
                size=header.size,
                sha256=header.sha256,
                step=header.step,
            )

    @contextmanager
    def _sent_right(self) -> Iterator[None]:
        try:
            yield
        except MalformedError as error:
            raise DaseError(
                f"the replay service at {self._address} sent a policy that cannot be used: {error}"
            ) from None
