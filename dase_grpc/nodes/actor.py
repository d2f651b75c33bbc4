"""The actor node: explores by the policy of an agent that another node trains, and stores what it sees."""

import asyncio
import logging
import platform
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

import torch

from dase_grpc.attendance import Attendance, Attendant
from dase_grpc.config import RunConfig
from dase_grpc.errors import ConfigError, RefusalError, WaitedTooLongError
from dase_grpc.explorer_metrics import ActorMetrics
from dase_grpc.health import Health
from dase_grpc.learning.acting import Acting, Rollout, actor_explorers
from dase_grpc.learning.env_ids import with_resolved_id
from dase_grpc.learning.envs import schema_of
from dase_grpc.learning.restarting import RestartableEnv, exploring_env
from dase_grpc.learning.watch import Watch
from dase_grpc.nodes import joining
from dase_grpc.nodes.attending import ActorConnection, attend
from dase_grpc.nodes.connection import Stream
from dase_grpc.nodes.draining import drain
from dase_grpc.nodes.following import FollowedPolicy
from dase_grpc.nodes.hanging import HangAlarm
from dase_grpc.nodes.joining import REPLAY_TIMEOUT_S, Wanted
from dase_grpc.nodes.leaving import FAREWELL_S
from dase_grpc.nodes.lifecycle import first_cause, run_node, unless
from dase_grpc.nodes.liveness import loop_turns
from dase_grpc.nodes.loop_lag import watch_loop_lag
from dase_grpc.nodes.monitoring import protection
from dase_grpc.nodes.rows import RowLink
from dase_grpc.nodes.sharded_joining import enter_all, follow_name, lines_to
from dase_grpc.nodes.shards import Shards
from dase_grpc.nodes.waits import Wait, WaitReason, say_waits
from dase_grpc.telemetry import make_registry, metrics_endpoint
from dase_grpc.wire.dialling import NO_CREDENTIALS, Credentials
from dase_grpc.wire.sharded import ReplayPlace

HELD_BACK_LOOK_S: Final = 0.5

Follow = Callable[[], Coroutine[Any, Any, None]]
"""Looks where shards are that have moved, until cancelled."""

log = logging.getLogger("dase")


@dataclass(frozen=True)
class ActorOptions:
    """What an actor node is told on its command line."""

    replay: ReplayPlace
    config: RunConfig
    agent_id: int
    envs: int = 1
    run_id: str = ""
    metrics_port: int = 0
    metrics_host: str = "127.0.0.1"
    metrics_tls: Path | None = None
    insecure: bool = False
    connect_timeout_s: float = 60.0
    replay_timeout_s: float = REPLAY_TIMEOUT_S
    credentials: Credentials = NO_CREDENTIALS

    def wanted(self, node_id: str) -> Wanted:
        """Which replay and run."""
        return Wanted(
            self.replay.addresses[0],
            self.agent_id,
            self.run_id,
            node_id=node_id,
            timeout_s=self.connect_timeout_s,
            away_s=self.replay_timeout_s,
            credentials=self.credentials,
        )

    @classmethod
    def parse(
        cls,
        config: RunConfig,
        *,
        replay: str,
        agent_id: int | None,
        envs: int,
        run_id: str | None,
        metrics_port: int | None,
        metrics_host: str,
        metrics_tls: Path | None = None,
        insecure: bool,
        replay_timeout_s: float | None = None,
        tls: Path | None = None,
        token_file: Path | None = None,
    ) -> Self:
        """Reads the texts of a command line.

        Raises:
            AddressError, ConfigError: in one sentence.
        """
        if agent_id is None:
            raise ConfigError("an actor says whose actor it is; give it an agent id with --agent")
        joining.require_agent(config, agent_id)
        return cls(
            ReplayPlace.parse(replay),
            config,
            agent_id,
            envs=envs,
            run_id=run_id or "",
            metrics_port=metrics_port or 0,
            metrics_host=metrics_host,
            metrics_tls=metrics_tls,
            insecure=insecure,
            replay_timeout_s=joining.replay_timeout_s(replay_timeout_s),
            credentials=Credentials(tls, token_file),
        )


@dataclass(frozen=True)
class Troupe:
    """An actor that has been let in, and what it is connected to."""

    connections: Sequence[ActorConnection]
    shards: Shards
    link: RowLink
    guide: FollowedPolicy
    acting: Acting
    envs: int
    metrics: ActorMetrics
    watch: Watch
    alarm: HangAlarm

    @property
    def connection(self) -> ActorConnection:
        """That to the first shard, which says who the learner is and keeps the policies."""
        return self.connections[0]

    @property
    def wait(self) -> Wait | None:
        """What it has waited for since long, if it has."""
        return self.connection.wait or self.guide.wait or self.link.wait

    def attendance(self) -> Attendance:
        """What it says of itself; its gauges show the same."""
        acting, version = self.acting, self.acting.version
        lag = None if version is None else max(0, self._known_updates - version)
        self.metrics.unacknowledged.set(self.link.unacknowledged)
        self.metrics.policy_lag.set(lag or 0)
        return Attendance(
            envs=self.envs,
            env_steps=acting.env_steps,
            env_steps_per_second=acting.env_steps_per_second,
            policy_version=version,
            policy_lag_updates=lag,
            state=self._state,
        )

    @property
    def _known_updates(self) -> int:
        return max(self.guide.latest_version or 0, self.connection.learner_updates)

    @property
    def _state(self) -> str:
        if (environment := self.watch.waiting) is not None:
            return f"waiting: {environment}"
        if (wait := self.wait) is not None:
            return f"waiting: {wait.text.removeprefix('waiting for ')}"
        if self.guide.latest_version is None:
            return f"waiting: a policy of agent {self.connection.target.member.agent_id}"
        return "exploring"


def actor_main(options: ActorOptions, *, stdin_is_leash: bool) -> int:
    """Runs an actor node as a process."""
    return run_node("actor", lambda stop: run_actor(options, stop), stdin_is_leash=stdin_is_leash)


async def run_actor(options: ActorOptions, stop: asyncio.Event) -> None:
    """Explores until `stop`; returns once every transition is acknowledged.

    Raises:
        UsageError: the environment or the settings cannot be used.
        RefusalError: the replay refused, was lost or is shutting down.
        WaitedTooLongError: the agent has no learner, or none that publishes.
        EnvironmentFailedError: an environment raised, and again whenever it was made anew.
        EnvironmentHangsError: a call into one does not return; the process cannot end but by `end_now`.
        Exception: a bug.
    """
    options.credentials.require_usable()
    config = with_resolved_id(options.config).for_agent(options.agent_id)
    where = (options.metrics_host, options.metrics_port)
    metrics_tls = protection(*where, tls=options.metrics_tls, insecure=options.insecure)
    torch.set_num_threads(config.train.threads)
    alarm = HangAlarm(asyncio.get_running_loop())
    watch = Watch(f"an actor of agent {options.agent_id}")
    with alarm.watching(watch, timeout_s=config.env.timeout_s), ExitStack() as cleanup:
        envs = []
        for _ in range(options.envs):
            envs.append(exploring_env(config.env, watch))
            cleanup.callback(envs[-1].close)
        schema = schema_of(envs[0], config.env.id)
        registry, health = make_registry(), Health(loop_turns())
        cleanup.enter_context(metrics_endpoint(registry, *where, health, tls=metrics_tls))
        node = Attendant(secrets.token_hex(8), f"actor@{platform.node()}", "actor", options.agent_id)
        async with lines_to(options.replay, options.credentials) as lines:
            enter = partial(attend, node=node)
            asking = enter_all(lines, options.wanted(node.node_id), schema, enter=enter, entered=[])
            let_in = await unless(stop, asking)
            if let_in is None:
                log.info("stopped before exploring")
                return
            run_id = let_in.member.run_id
            log.info("explores for agent %d of run %s at %s", node.agent_id, run_id, options.replay)
            metrics = ActorMetrics(registry, options.agent_id)
            connections = [
                ActorConnection(
                    target,
                    node=node,
                    timeout_s=options.replay_timeout_s,
                    metrics=metrics,
                    look_why_away=partial(
                        options.credentials.require_let_in, address.host, address.port, address.server_name
                    ),
                )
                for target, address in zip(let_in.targets, let_in.addresses, strict=True)
            ]
            troupe = put_together(
                connections, envs=envs, config=config, node=node, metrics=metrics, watch=watch, alarm=alarm
            )
            with health.ready():
                await _explore_to_the_end(troupe, options, stop, partial(follow_name, troupe.shards, lines))


def put_together(
    connections: Sequence[ActorConnection],
    *,
    envs: list[RestartableEnv],
    config: RunConfig,
    node: Attendant,
    metrics: ActorMetrics,
    watch: Watch,
    alarm: HangAlarm,
) -> Troupe:
    """Puts the exploring thread's parts and its streams together; none is open yet.

    The node's id is random and of this process alone: the writer, the noise and the episodes follow from it.
    """
    shards, connection = Shards(connections), connections[0]
    target = connection.target
    agent_id, schema = target.member.agent_id, target.schema
    metrics.expect(streams=Stream, waits=WaitReason)
    metrics.envs.set(len(envs))
    link = RowLink(
        shards,
        writer_id=node.writer_id,
        paced=not config.train.explore,
        count_acknowledged=metrics.acknowledged.inc,
    )
    guide = FollowedPolicy(
        connection,
        agent_id=agent_id,
        config=config.agent,
        schema=schema,
        uniformly=lambda: (
            sum(each.inserted for each in connections) + link.unacknowledged < config.agent.start_steps
        ),
    )
    explorers = actor_explorers(
        envs,
        schema,
        config=config.agent,
        agent_id=agent_id,
        seed=config.train.seed,
        actor=int(node.node_id, 16),
    )
    acting = Acting(
        Rollout(explorers),
        guide,
        link,
        metrics=metrics,
        name=f"an actor of agent {agent_id}",
        clock=time.monotonic,
    )
    return Troupe(connections, shards, link, guide, acting, len(envs), metrics, watch, alarm)


async def _explore_to_the_end(
    troupe: Troupe,
    options: ActorOptions,
    stop: asyncio.Event,
    follow: Follow,
) -> None:
    try:
        with first_cause():
            await _explore(troupe, options, stop, follow)
        log.info("stopped after %d environment steps", troupe.acting.env_steps)
    finally:
        if troupe.link.unacknowledged:
            log.info("%d transitions were not acknowledged", troupe.link.unacknowledged)
        for connection in troupe.connections:
            with suppress(RefusalError):
                await connection.leave(timeout_s=FAREWELL_S)


async def _explore(
    troupe: Troupe,
    options: ActorOptions,
    stop: asyncio.Event,
    follow: Follow,
) -> None:
    """Runs the exploring thread beside its streams; the thread has ended when this returns or raises.

    Raises:
        EnvironmentHangsError: the thread hangs in an environment, and has not ended.
        ExceptionGroup: of what broke a stream.
        Exception: what the thread raised, whatever the streams did then.
    """
    link, halt = troupe.link, threading.Event()
    exploring: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    exploring.set_result(None)
    try:
        async with asyncio.TaskGroup() as tasks:
            inserting = tasks.create_task(link.insert_rows())
            jobs = [
                *(each.attending(troupe.attendance) for each in troupe.connections),
                follow(),
                troupe.guide.run(),
                watch_loop_lag(troupe.metrics.loop_lag.observe),
                say_waits(lambda: troupe.wait, count=troupe.metrics.waited),
                _held_back(troupe, options.replay_timeout_s),
            ]
            others = [tasks.create_task(job) for job in jobs]
            await unless(stop, troupe.guide.first(timeout_s=options.replay_timeout_s))
            if not stop.is_set():
                exploring = asyncio.ensure_future(asyncio.to_thread(troupe.acting.explore, halt))
                await unless(stop, troupe.alarm.unless_hanging(exploring))
            halt.set()
            await drain(exploring, inserting, link=link, shards=troupe.shards, alarm=troupe.alarm, stop=stop)
            for task in others:
                task.cancel()
    finally:
        halt.set()
        link.close()
        await troupe.alarm.unless_hanging(exploring)
        if (error := exploring.exception()) is not None:
            raise error from error.__cause__


async def _held_back(troupe: Troupe, limit_s: float) -> None:
    """Ends an actor whose transitions the replay holds back, because the learner makes no updates.

    Raises:
        WaitedTooLongError: it has for too long.
    """
    since, acknowledged = time.monotonic(), -1.0
    while True:
        now, count = time.monotonic(), troupe.link.acknowledged
        if count != acknowledged or troupe.link.held_back is None:
            since, acknowledged = now, count
        elif now - since >= limit_s:
            raise WaitedTooLongError(
                f"the replay has stored nothing for {limit_s:g} s, {troupe.link.held_back}, so this actor "
                f"ends; see what the learner waits for, or let the actor wait longer with --replay-timeout"
            )
        await asyncio.sleep(HELD_BACK_LOOK_S)
