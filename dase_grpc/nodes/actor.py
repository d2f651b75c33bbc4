"""The actor node: explores by the policy of an agent that another node trains, and stores what it sees."""

import asyncio
import logging
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Self

from dase_grpc.errors import RefusalError, WaitedTooLongError
from dase_grpc.learning.envs.restarts import RestartableEnv, exploring_env
from dase_grpc.learning.training.collection import Acting, Rollout, actor_explorers
from dase_grpc.metrics.nodes import ActorMetrics
from dase_grpc.nodes.followed import FollowedPolicy
from dase_grpc.nodes.frame import NodeFrame, attendant, framed
from dase_grpc.nodes.options import ActorOptions
from dase_grpc.process.lifecycle import run_node
from dase_grpc.process.tasks import unless, watch_loop_lag
from dase_grpc.progress import Attendance, Attendant, several
from dase_grpc.replay.client.admission import AgentFinished, Joined, attend, enter_all
from dase_grpc.replay.client.compute import Compute
from dase_grpc.replay.client.connection import Stream
from dase_grpc.replay.client.discovery import follow_name
from dase_grpc.replay.client.handoff import Standstill, Wait, WaitReason, say_waits
from dase_grpc.replay.client.link import RowLink
from dase_grpc.replay.client.membership import ActorConnection, has_finished
from dase_grpc.replay.client.shards import Shards

log = logging.getLogger("dase")


def actor_main(options: ActorOptions, *, stdin_is_leash: bool) -> int:
    """Runs an actor node as a process."""
    return run_node("actor", lambda stop: run_actor(options, stop), stdin_is_leash=stdin_is_leash)


async def run_actor(options: ActorOptions, stop: asyncio.Event) -> None:
    """Explores until `stop` or until the agent has finished; every transition is acknowledged then.

    With --stay it returns at `stop` only.
    """
    owner = f"an actor of agent {options.agent_id}"
    async with framed(options, stop, owner, make=exploring_env, envs=options.envs) as frame:
        node = attendant("actor", options.agent_id)
        wanted, enter = options.wanted(node.node_id, options.agent_id), partial(attend, node=node)
        asking = enter_all(frame.lines, wanted, frame.schema, enter=enter, entered=[])
        try:
            joined = await frame.unless_stopped(asking, before="exploring")
        except AgentFinished as finished:
            log.info("%s, so this actor ends; resume its learner before you start one", finished)
            await frame.stay()
            return
        if joined is None:
            return
        run_id = joined.member.run_id
        log.info("explores for agent %d of run %s at %s", options.agent_id, run_id, options.replay)
        exploration = Exploration.of(frame, joined, node)
        with frame.health.ready():
            await exploration.run()
        await frame.stay(exploration.metrics.finished)


@dataclass(frozen=True)
class Exploration:
    """The exploring thread of an actor that has been let in, and what it is connected to."""

    frame: NodeFrame[RestartableEnv]
    connections: Sequence[ActorConnection]
    shards: Shards
    link: RowLink
    guide: FollowedPolicy
    acting: Acting
    metrics: ActorMetrics
    halt: threading.Event = field(default_factory=threading.Event)
    halted: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    def of(cls, frame: NodeFrame[RestartableEnv], joined: Joined, node: Attendant) -> Self:
        """Puts thread and streams together; writer, noise and episodes follow from the node's id."""
        agent_id, schema = joined.targets[0].member.agent_id, frame.schema
        config = frame.config.for_agent(agent_id)
        metrics = ActorMetrics(frame.registry, agent_id)
        metrics.expect(streams=Stream, waits=WaitReason)
        metrics.envs.set(len(frame.envs))
        connections = frame.connected(joined, ActorConnection, node=node, metrics=metrics)
        shards = Shards(connections)
        link = RowLink(
            shards,
            writer_id=node.writer_id,
            paced=not config.train.explore,
            count_acknowledged=metrics.acknowledged.inc,
        )

        def uniformly() -> bool:
            inserted = sum(each.inserted for each in connections)
            return inserted + link.unacknowledged < config.agent.start_steps

        guide = FollowedPolicy(
            connections[0], agent_id=agent_id, config=config.agent, schema=schema, uniformly=uniformly
        )
        explorers = actor_explorers(
            frame.envs,
            schema,
            config=config.agent,
            agent_id=agent_id,
            seed=config.train.seed,
            actor=int(node.node_id, 16),
        )
        acting = Acting(
            Rollout(explorers), guide, link, metrics=metrics, name=frame.watch.owner, clock=time.monotonic
        )
        return cls(frame, connections, shards, link, guide, acting, metrics)

    @property
    def connection(self) -> ActorConnection:
        """That to the first shard, which says who the learner is and keeps the policies."""
        return self.connections[0]

    @property
    def over(self) -> bool:
        """Whether the agent has done all its steps, so that nobody needs more transitions."""
        return self.connection.finished.is_set()

    @property
    def wait(self) -> Wait | None:
        """What it has waited for since long, if it has."""
        return self.connection.wait or self.guide.wait or self.link.wait

    async def run(self) -> None:
        """Explores until the node is to stop or the agent has finished; all is acknowledged then.

        What the replay has not taken of an agent that has finished is dropped, for no learner needs it.
        """
        try:
            await self._explore()
            if self.over:
                log.info(
                    "%s, so this actor ends after %d environment steps; %d transitions that no learner needs "
                    "any more are dropped",
                    has_finished(self.connection.target.member.agent_id),
                    self.acting.env_steps,
                    self.link.unacknowledged,
                )
            else:
                log.info("stopped after %d environment steps", self.acting.env_steps)
        finally:
            if self.link.unacknowledged and not self.over:
                lost = several(self.link.unacknowledged, "transition was", "transitions were")
                log.info("%s not acknowledged", lost)
            for connection in self.connections:
                with suppress(RefusalError):
                    await connection.leave()

    def attendance(self) -> Attendance:
        """What it says of itself; its gauges show the same."""
        acting, version = self.acting, self.acting.version
        known = max(self.guide.latest_version or 0, self.connection.learner_updates)
        lag = None if version is None else max(0, known - version)
        self.metrics.unacknowledged.set(self.link.unacknowledged)
        self.metrics.policy_lag.set(lag or 0)
        return Attendance(
            envs=len(self.frame.envs),
            env_steps=acting.env_steps,
            env_steps_per_second=acting.env_steps_per_second,
            policy_version=version,
            policy_lag_updates=lag,
            state=self._state,
        )

    @property
    def _state(self) -> str:
        if (environment := self.frame.watch.waiting) is not None:
            return f"waiting: {environment}"
        if (wait := self.wait) is not None:
            return wait.state
        if self.guide.latest_version is None:
            return f"waiting: a policy of agent {self.connection.target.member.agent_id}"
        return "exploring"

    async def _explore(self) -> None:
        frame, timing = self.frame, self.connection.timing
        thread = asyncio.ensure_future(self._thread())
        compute = Compute(
            thread, self._halt, frame.stop, frame.alarm, self.shards, over=self.connection.finished
        )
        jobs = [
            self.shards.heartbeats(self.attendance),
            follow_name(self.shards, frame.lines),
            self.guide.run(),
            watch_loop_lag(self.metrics.loop_lag.observe),
            say_waits(lambda: self.wait, count=self.metrics.waited, timing=timing),
            self._held_back(),
        ]
        await compute.run(jobs, link=self.link)

    async def _thread(self) -> None:
        """Explores once there is a policy, unless told to halt before."""
        await unless(self.halted, self.guide.first(timeout_s=self.frame.options.replay_timeout_s))
        if not self.halted.is_set():
            await asyncio.to_thread(self.acting.explore, self.halt)

    def _halt(self) -> None:
        self.halt.set()
        self.halted.set()

    async def _held_back(self) -> None:
        """Ends an actor whose transitions are held back for too long, as its learner makes no updates."""
        limit_s = self.frame.options.replay_timeout_s
        standstill = Standstill(limit_s)
        while True:
            held_back = self.link.held_back
            if standstill.lasts(self.link.acknowledged, waiting=held_back is not None):
                raise WaitedTooLongError(
                    f"the replay has stored nothing for {limit_s:g} s, {held_back}, so this actor ends; see "
                    f"what the learner waits for, or let the actor wait longer with --replay-timeout"
                )
            await asyncio.sleep(self.connection.timing.beat_s)
