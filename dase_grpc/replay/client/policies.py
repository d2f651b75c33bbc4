"""Policies out and in: published, subscribed to, and both for a thread that never waits."""

import asyncio
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Generic, Self, TypeVar

from grpc.aio import Channel

from dase_grpc.errors import DaseError, MalformedError
from dase_grpc.progress import is_newer
from dase_grpc.replay.buffer.policies import IncomingPolicy, PolicyBytes, require_size
from dase_grpc.replay.client.cluster import UNARY_TIMEOUT_S, StreamTarget
from dase_grpc.replay.client.connection import Connection, Stream
from dase_grpc.replay.client.streams import ClientStream, ClientUpload, OneStream, opened_in_time
from dase_grpc.replay.wire.addresses import CHUNK_BYTES
from dase_grpc.replay.wire.v1 import policy_pb2, policy_pb2_grpc

PUBLISH_TIMEOUT_S: Final = 60.0
"""How long one policy may take to be published, the wait for a connection included."""


Out = TypeVar("Out")
In = TypeVar("In")


@dataclass(frozen=True)
class _Outgoing:
    version: int
    step: int
    payload: bytes


class PolicyExchange(Generic[Out, In]):
    """What one agent publishes, and what others have published last.

    `publish` and `latest` belong to the compute thread and never wait for the network; `run` and `flush`
    belong to the event loop that made the exchange. Each direction keeps the latest policy only: one that
    has not been sent yet is replaced by the next, and so is one that nobody has looked at. The threads
    meet in single references that one side sets and the other reads, so neither needs a lock. The service
    keeps policies in memory, so the latest is sent again when it was started anew. `steps` is set to how
    many environment steps the agent has had.
    """

    def __init__(
        self,
        connection: Connection,
        *,
        follow: Collection[int],
        pack: Callable[[Out], bytes],
        unpack: Callable[[PolicyBytes], In],
    ) -> None:
        self._connection = connection
        self._follow = frozenset(follow)
        self._pack = pack
        self._unpack = unpack
        self._loop = asyncio.get_running_loop()
        self.steps: Callable[[], int] = lambda: 0
        self._outgoing: _Outgoing | None = None  # set by the compute thread
        self._accepted: _Outgoing | None = None  # set by the event loop
        self._moved = asyncio.Event()
        self._arrived: dict[int, PolicyBytes] = {}  # set by the event loop
        self._seen: dict[int, tuple[PolicyBytes, In]] = {}  # of the compute thread alone
        connection.on_restart(self._send_again)

    def publish(self, version: int, policy: Out) -> None:
        """Makes a policy the agent's latest; it is packed here, and sent by `run`.

        The version last published goes out again where the agent has had more steps since; ValueError for a
        lower one.
        """
        before, step = self._outgoing, self.steps()
        newer = is_newer(version, None if before is None else before.version)
        if newer or before is None or step > before.step:
            self._outgoing = _Outgoing(version, step, self._pack(policy))
            self._loop.call_soon_threadsafe(self._moved.set)

    def latest(self, agent_id: int) -> In | None:
        """What a followed agent has published last, None if nothing; unpacked when first looked at."""
        if agent_id not in self._follow:
            raise KeyError(f"agent {agent_id} is not among those followed: {sorted(self._follow)}")
        policy = self._arrived.get(agent_id)
        if policy is None:
            return None
        seen = self._seen.get(agent_id)
        if seen is None or seen[0] is not policy:
            seen = self._seen[agent_id] = (policy, self._unpack(policy))
        return seen[1]

    async def run(self) -> None:
        """Sends what is published and takes what the others publish, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._connection.keep(Stream.PUBLISH, self._send))
            if self._follow:
                tasks.create_task(follow(self._connection, self._follow, self._take))

    async def flush(self) -> None:
        """Returns once the policy published last is the service's; waits for good if `run` does not run."""
        while True:
            self._moved.clear()
            if self._outgoing is self._accepted:
                return
            await self._moved.wait()

    def _send_again(self) -> None:
        self._accepted = None
        self._moved.set()

    async def _send(self, target: StreamTarget) -> None:
        while True:
            self._moved.clear()
            outgoing = self._outgoing
            if outgoing is None or outgoing is self._accepted:
                await self._moved.wait()
                continue
            incarnation = self._connection.incarnation
            await self._publish(target, outgoing)
            self._connection.up(Stream.PUBLISH)
            if incarnation == self._connection.incarnation:
                self._accepted = outgoing
            self._moved.set()

    @staticmethod
    async def _publish(target: StreamTarget, policy: _Outgoing) -> None:
        await PolicyPublisher(target).publish(policy.version, policy.payload, step=policy.step)

    def _take(self, policy: PolicyBytes) -> None:
        self._arrived[policy.agent_id] = policy


async def follow(
    connection: Connection, agent_ids: Collection[int], take: Callable[[PolicyBytes], None]
) -> None:
    """Calls `take` with each policy of these agents that arrives; begins again when the stream breaks."""

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


@dataclass(frozen=True)
class PolicyPublisher:
    """Publishes the policies of one agent, one at a time."""

    target: StreamTarget

    async def publish(
        self, version: int, payload: bytes, *, step: int = 0, timeout_s: float = PUBLISH_TIMEOUT_S
    ) -> int:
        """Makes a policy the agent's latest after `step` steps; returns the version that subscribers get now.

        Waits for the connection. Safe to repeat with the same version and bytes; cancelling it leaves the
        policy as it was or as it shall be. StalePolicyError if a newer one, or another of this version, was
        published; UnreachableError also when `timeout_s` have passed.
        """
        require_size(len(payload))
        target, member = self.target, self.target.member
        policy = PolicyBytes.of(payload, agent_id=member.agent_id, epoch=member.epoch, version=version)
        header = policy_pb2.PublishHeader(
            stream=target.header(), version=version, size=len(payload), sha256=policy.sha256, step=step
        )
        call = policy_pb2_grpc.PolicyServiceStub(target.channel).Publish(
            timeout=timeout_s, wait_for_ready=True
        )
        stream = ClientUpload(call, target.address)
        try:
            await stream.write(policy_pb2.PublishRequest(header=header))
            for start in range(0, len(payload), CHUNK_BYTES):
                await stream.write(policy_pb2.PublishRequest(chunk=payload[start : start + CHUNK_BYTES]))
            await stream.end_writing()
            answer = await stream.answer()
        finally:
            stream.cancel()
        return int(answer.latest_version)


class PolicySubscriber(OneStream):
    """One Subscribe stream: the latest policy of each wanted agent, then each newer one; only errors end it.

    DaseError if the service sends what was not asked for or not what it announced.
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

    async def open(self) -> Self:
        """Starts the stream; waits for the connection."""
        call = self._stub.Subscribe(self._request, wait_for_ready=True)
        self._stream = stream = ClientStream(call, self._address)
        async with opened_in_time(stream, self._address, UNARY_TIMEOUT_S):
            await stream.connected()
        return self

    async def next(self) -> PolicyBytes:
        """The next policy; waits for it. Policies between two calls may have been skipped."""
        incoming = self._announced(await self._opened.read())
        while not incoming.whole:
            answer = await self._opened.read()
            with self._sent_right():
                incoming.add(answer.chunk)
        with self._sent_right():
            return incoming.finish()

    def __aiter__(self) -> Self:
        return self

    __anext__ = next

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
