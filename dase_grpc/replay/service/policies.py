"""PolicyService: Publish and Subscribe over a PolicyBoard."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Final

import grpc

from dase_grpc.errors import MalformedError
from dase_grpc.progress import MAX_AGENT_ID
from dase_grpc.replay.buffer.policies import IncomingPolicy
from dase_grpc.replay.buffer.run import SharedRun
from dase_grpc.replay.security.door import require_policies
from dase_grpc.replay.service.interceptors import read, read_first
from dase_grpc.replay.service.streams import Changes, Streams
from dase_grpc.replay.wire.addresses import CHUNK_BYTES, MAX_CHUNK_BYTES
from dase_grpc.replay.wire.status import Context
from dase_grpc.replay.wire.v1 import policy_pb2, policy_pb2_grpc

PUBLISH_IDLE_S: Final = 60.0


class PolicyServicer(policy_pb2_grpc.PolicyServiceServicer):
    """PolicyService over a SharedRun, whose policy board holds every rule. Lives on one event loop.

    A subscriber's stream holds no queue: it looks for the latest policies whenever one was published
    and it has sent the one before, so it keeps at most the policy it is sending from being freed.

    Attributes:
        idle_s: how long it waits for the next message of a policy, whose pieces it holds meanwhile.
    """

    def __init__(self, run: SharedRun) -> None:
        self.streams = Streams(run, "Publish", "Subscribe")
        self._run = run
        self.idle_s = PUBLISH_IDLE_S
        self._published = Changes()

    async def Publish(
        self, request_iterator: AsyncIterator[policy_pb2.PublishRequest], context: Context
    ) -> policy_pb2.PublishResponse:
        return await self.streams.serve(context, self._publish, rpc="Publish")

    # grpc.aio runs a coroutine that writes to its context as well as a generator; the generated
    # stubs know only the generator.
    async def Subscribe(  # type: ignore[override]
        self, request: policy_pb2.SubscribeRequest, context: Context
    ) -> None:
        await self.streams.serve(context, partial(self._subscribe, request), rpc="Subscribe")

    async def _publish(self, context: Context) -> policy_pb2.PublishResponse:
        request = await read_first(context)
        if request is grpc.aio.EOF or request.WhichOneof("kind") != "header":
            raise MalformedError("the first message of a Publish stream must be its header")
        header, stream = request.header, request.header.stream
        self.streams.admit(context, stream)
        incoming = IncomingPolicy(
            agent_id=stream.agent_id,
            epoch=stream.lease_epoch,
            version=header.version,
            size=header.size,
            sha256=header.sha256,
            step=header.step,
        )
        with self._run.policies.arriving(incoming):

            def require_valid() -> None:
                incoming.require_kept()
                self._run.leases.require(stream.agent_id, stream.lease_epoch)

            self.streams.look()  # ends the stream whose place this one has taken
            self.streams.require(context, require_valid)
            while await self._take_piece(context, incoming):
                require_valid()
            require_valid()
            policy = incoming.finish()
        if self._run.policies.publish(policy):
            self._published.tell(policy.agent_id)
        return policy_pb2.PublishResponse(latest_version=policy.version)

    async def _take_piece(self, context: Context, incoming: IncomingPolicy) -> bool:
        """Adds what the next message brings, and keeps none of it besides; whether one came."""
        try:
            async with asyncio.timeout(self.idle_s):
                request = await read(context)
        except TimeoutError:
            raise MalformedError(
                f"policy {incoming.version} of agent {incoming.agent_id} has {incoming.held_bytes} of "
                f"{incoming.size} bytes, and no more came within {self.idle_s:g} s; send all of it, and "
                f"then end your side of the stream"
            ) from None
        if request is grpc.aio.EOF:
            return False
        if (kind := request.WhichOneof("kind")) != "chunk":
            raise MalformedError(f"after its header a Publish stream takes chunks, not {kind or 'nothing'}")
        if len(request.chunk) > MAX_CHUNK_BYTES:
            raise MalformedError(
                f"a chunk of a policy has at most {MAX_CHUNK_BYTES} bytes, not {len(request.chunk)}"
            )
        incoming.add(request.chunk)
        return True

    async def _subscribe(self, request: policy_pb2.SubscribeRequest, context: Context) -> None:
        require_policies(request.agent_ids)
        self._run.require_reader(run_id=request.run_id, fingerprint=request.schema_fingerprint)
        wanted = frozenset(request.agent_ids)
        if wanted and max(wanted) > MAX_AGENT_ID:
            raise MalformedError(f"agent id {max(wanted)} is outside 0..{MAX_AGENT_ID}")
        sent: dict[int, tuple[int, int, int]] = {}
        with self._run.policies.following(wanted), self._published.of(wanted) as published:
            await self.streams.admitted(context)
            while True:
                published.clear()  # before the look, so that nothing is missed in between
                for agent_id in sorted(wanted) or self._run.policies.agents():  # each in turn: none starves
                    await self._send_if_newer(context, agent_id, sent)
                await published.wait()

    async def _send_if_newer(
        self, context: Context, agent_id: int, sent: dict[int, tuple[int, int, int]]
    ) -> None:
        policy = self._run.policies.latest(agent_id)
        if policy is None or policy.age == sent.get(agent_id):
            return
        sent[agent_id] = policy.age
        header = policy_pb2.PolicyHeader(
            agent_id=agent_id,
            lease_epoch=policy.epoch,
            version=policy.version,
            size=len(policy.payload),
            sha256=policy.sha256,
            step=policy.step,
        )
        await context.write(policy_pb2.SubscribeResponse(header=header))
        for start in range(0, len(policy.payload), CHUNK_BYTES):
            piece = policy.payload[start : start + CHUNK_BYTES]
            await context.write(policy_pb2.SubscribeResponse(chunk=piece))
