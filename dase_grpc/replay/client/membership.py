"""A node's place at a shard, kept while it works: by its own lease, by none, or by that of its learner."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from dase_grpc.errors import (
    AgentTakenError,
    BufferGoneError,
    RefusalError,
    StaleLeaseError,
    WaitedTooLongError,
)
from dase_grpc.pace import Backoff
from dase_grpc.progress import Attendance, Attendant, Progress, several
from dase_grpc.replay.client.cluster import StreamTarget
from dase_grpc.replay.client.connection import Connection, Stream
from dase_grpc.replay.client.handoff import Wait, Waited, WaitReason
from dase_grpc.replay.client.patience import AWAY, NODE_NAME
from dase_grpc.replay.wire.messages import Membership
from dase_grpc.replay.wire.v1 import cluster_pb2, replay_pb2

FAREWELL_S: Final = 2.0
"""How long a replay may take for each call of a node that leaves."""

FEW_AGENTS: Final = 64
ASK_OF_ALL_EVERY: Final = 10
"""Heartbeats, of which one asks for the counts of all agents where these are more than few."""

log = logging.getLogger("dase")


class LearnerConnection(Connection):
    """A Connection under a lease of the node's own.

    If the replay came back without its data, the learner joins again under the same agent id, once for all
    its streams, and `accept` raises where the new membership of all shards does not fit. If another node has
    the id, the learner is fenced off: StaleLeaseError, for good.

    With `asks_of_all` some heartbeats are answered with how many transitions each agent has ever stored,
    which is then `inserted_by_agent`: all of them while the agents are few.
    """

    def __init__(
        self,
        target: StreamTarget,
        *,
        accept: Callable[[Membership], None] = lambda member: None,
        asks_of_all: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(target, **options)
        self._accept = accept
        self._rejoining = asyncio.Lock()
        self._asks_of_all = asks_of_all
        self._beats = 0
        self.inserted_by_agent = dict(self.buffer.inserted_by_agent)

    async def _report(self, said: Progress) -> cluster_pb2.HeartbeatResponse:
        few = len(self.inserted_by_agent) <= FEW_AGENTS
        of_all = self._asks_of_all and (few or self._beats % ASK_OF_ALL_EVERY == 0)
        target = self.target
        answer = await target.cluster.heartbeat(target.member, said, own_counts=not of_all)
        self._beats += 1
        if of_all:
            self.inserted_by_agent = dict(answer.buffer.inserted_by_agent)
        return answer

    def _heard(self, answer: cluster_pb2.HeartbeatResponse) -> None:
        self.followers = answer.followers
        self._notice(answer.buffer)

    async def _replaced(self, target: StreamTarget, error: StaleLeaseError) -> None:
        raise self._fenced(error) from error

    async def _rejoin(
        self, stream: Stream, target: StreamTarget, error: BufferGoneError, backoff: Backoff
    ) -> None:
        """Joins under the same agent id, if no other stream has."""
        async with self._rejoining:
            if self.target is not target:
                return
            before = target.member
            try:
                member = await target.cluster.join(
                    node_name=NODE_NAME,
                    schema=target.schema,
                    agent_id=before.agent_id,
                    run_id=before.run_id,
                    lost_buffer_id=before.buffer_id,
                    node_id=before.node_id,
                )
            except AWAY as away:
                self._down(stream, away)
                await asyncio.sleep(backoff.next_s())
                return
            except AgentTakenError as taken:
                raise self._fenced(taken) from taken
            self._accept(replace(member, capacity=member.capacity * member.shard.count))
            self.target = replace(target, member=member)
            self.lost(
                f"the replay service at {target.address} came back without its data (incarnation "
                f"{member.incarnation}, was {self.incarnation}): the {self.buffer_size} transitions of the "
                f"run that it held are gone; joined again as agent {member.agent_id} (epoch {member.epoch}), "
                f"the buffer fills up anew"
            )
            self.buffer_size, self.buffer = member.buffer_size, member.buffer
            self._restarted(member.incarnation)

    def _fenced(self, error: RefusalError) -> StaleLeaseError:
        agent_id = self.target.member.agent_id
        return StaleLeaseError(
            f"fenced off: agent {agent_id} belongs to another node now, so this one ends and stores "
            f"nothing more ({str(error).partition('; ')[0]})"
        )


class AttendantConnection(Connection):
    """A Connection of a node that has no lease."""

    def __init__(self, target: StreamTarget, *, node: Attendant, **options: Any) -> None:
        super().__init__(target, **options)
        self.node = node

    async def attend(self, attendance: Attendance) -> cluster_pb2.AttendResponse:
        """Says what the node does."""
        target = self.target
        return await target.cluster.attend(
            self.node, attendance, run_id=target.member.run_id, fingerprint=target.schema.fingerprint
        )

    async def _report(self, said: Attendance) -> cluster_pb2.AttendResponse:
        return await self.attend(said)

    async def leave(self) -> None:
        """Says that the node ends. RefusalError if the replay is not there to hear it."""
        await self.target.cluster.attend(
            self.node, Attendance(), run_id=self.target.member.run_id, leaving=True, timeout_s=FAREWELL_S
        )


class EvaluatorConnection(AttendantConnection):
    """A Connection of an evaluator.

    Attributes:
        hear: called after each heartbeat with what the replay holds and with how far all agents are.
    """

    def __init__(self, target: StreamTarget, **options: Any) -> None:
        super().__init__(target, **options)
        self._buffer_id = target.member.buffer_id
        self.hear: Callable[[replay_pb2.BufferState, cluster_pb2.StatusResponse], None] = lambda *heard: None
        self._status = cluster_pb2.StatusResponse()

    async def _report(self, said: Attendance) -> cluster_pb2.AttendResponse:
        answer = await super()._report(said)
        self._status = await self.target.cluster.status()
        return answer

    def _heard(self, answer: cluster_pb2.AttendResponse) -> None:
        held, state = self.buffer_size, answer.buffer
        if held and state.buffer_id != self._buffer_id:
            self.lost(
                f"the replay service at {self.target.address} came back without its data (incarnation "
                f"{state.incarnation}, was {self.incarnation}): the {several(held, 'transition')} of the run "
                f"that it held are gone"
            )
        self._buffer_id = state.buffer_id
        self._notice(state)
        self.hear(state, self._status)


class ActorConnection(AttendantConnection):
    """A Connection of a node that works under its learner's lease, whoever that learner is.

    When the learner was replaced, or the replay came back without its data, the streams begin again under
    the lease that is there now, of which the heartbeat tells; for one they wait up to `timeout_s`. `finished`
    is set once the agent has done all its steps and its learner has left.
    """

    def __init__(self, target: StreamTarget, **options: Any) -> None:
        super().__init__(target, **options)
        self._renewed = asyncio.Event()
        self._unled = Waited(self.timing)
        self.finished = asyncio.Event()
        self.learner_updates = 0

    @property
    def wait(self) -> Wait | None:
        """The wait for a learner, if it is a long one."""
        if not self._unled.long:
            return None
        return Wait(self._unled, WaitReason.LEARNER, f"waiting for {learner_of(self.node)}")

    @property
    def inserted(self) -> int:
        """Transitions that the agent as a whole had stored here when the replay was last heard of."""
        return self.inserted_of(self.target.member.agent_id)

    def _heard(self, answer: cluster_pb2.AttendResponse) -> None:
        if not answer.HasField("lease"):
            self.buffer = answer.buffer
            if answer.agent_finished:
                self.finished.set()
            self._unled.begin()
            return
        self._unled.end()
        self.learner_updates = answer.learner_updates
        before = self.target.member
        member = Membership.of(answer, ttl_s=answer.ttl_seconds, node_id=self.node.node_id)
        if (before.epoch, before.buffer_id) == (member.epoch, member.buffer_id):
            self._notice(answer.buffer)
            return
        self.target, self.buffer = replace(self.target, member=member), answer.buffer
        if before.buffer_id != member.buffer_id:
            self.lost(
                f"the replay service at {self.target.address} came back without its data (incarnation "
                f"{member.incarnation}, was {self.incarnation}); going on with the buffer that is there now"
            )
            self._restarted(member.incarnation)
        log.info("agent %d has another learner (epoch %d)", member.agent_id, member.epoch)
        self._renewed.set()
        self._renewed = asyncio.Event()

    async def _replaced(self, target: StreamTarget, error: RefusalError) -> None:
        """Waits for another lease or buffer than those of `target`; WaitedTooLongError if none comes."""
        if self.target is not target:
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._renewed.wait()
        except TimeoutError:
            raise without_learner(self.node, self._timeout_s) from None

    async def _rejoin(
        self, stream: Stream, target: StreamTarget, error: BufferGoneError, backoff: Backoff
    ) -> None:
        await self._replaced(target, error)


def has_finished(agent_id: int | None) -> str:
    """Why an actor has nothing to do any more."""
    return f"agent {agent_id} has finished"


def learner_of(node: Attendant) -> str:
    """What an actor waits for whose agent has no learner, and how to end that."""
    agent = node.agent_id
    return f"a learner of agent {agent}: start one with `dase node --role learner --agent {agent}`"


def without_learner(node: Attendant, waited_s: float) -> WaitedTooLongError:
    """Why an actor ends whose agent has no learner."""
    agent = node.agent_id
    return WaitedTooLongError(
        f"agent {agent} has had no learner for {waited_s:g} s, so this actor ends; start one with "
        f"`dase node --role learner --agent {agent}`, or let it wait longer with --replay-timeout"
    )
