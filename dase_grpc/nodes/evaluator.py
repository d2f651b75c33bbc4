"""The evaluator node: takes evaluation off the learners, by the same protocol and into the same files."""

import asyncio
import logging
import platform
import secrets
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from dase_grpc.config.resolve import RunConfig
from dase_grpc.errors import WaitedTooLongError
from dase_grpc.learning.envs.ids import with_resolved_id
from dase_grpc.learning.envs.make import schema_of
from dase_grpc.learning.envs.restarts import evaluation_env
from dase_grpc.metrics.endpoint import Health, make_registry, metrics_endpoint
from dase_grpc.metrics.nodes import EvaluatorMetrics
from dase_grpc.nodes.due import DuePolicies
from dase_grpc.nodes.evaluating import Evaluating
from dase_grpc.nodes.monitoring import protection
from dase_grpc.nodes.options import EvaluatorOptions
from dase_grpc.nodes.results import EvaluationBooks, results_path
from dase_grpc.process.lifecycle import HangAlarm, run_node
from dase_grpc.process.tasks import first_cause, loop_turns, unless, watch_loop_lag
from dase_grpc.process.watchdog import Watch
from dase_grpc.progress import Attendant, several
from dase_grpc.replay.client.attending import Guest, arrived
from dase_grpc.replay.client.channels import lines_to
from dase_grpc.replay.client.cluster import ClusterClient, StreamTarget
from dase_grpc.replay.client.connection import Connection, Stream
from dase_grpc.replay.client.finding import follow_name
from dase_grpc.replay.client.policies import follow
from dase_grpc.replay.client.shards import Shards
from dase_grpc.schema import TransitionSchema

ATTEND_S: Final = 0.5
ROLE: Final = "evaluator"

log = logging.getLogger("dase")


def evaluator_main(options: EvaluatorOptions, *, stdin_is_leash: bool) -> int:
    """Runs an evaluator node as a process."""
    return run_node(ROLE, lambda stop: run_evaluator(options, stop), stdin_is_leash=stdin_is_leash)


async def run_evaluator(options: EvaluatorOptions, stop: asyncio.Event) -> None:
    """Evaluates until each agent has ended and its last policy is evaluated, or until `stop`.

    An evaluation that is under way at `stop` is dropped.

    Raises:
        UsageError: the environment, the settings or the run directory cannot be used.
        RefusalError: the replay refused, or was away for too long.
        EnvironmentFailedError, EnvironmentHangsError: as for a learner (nodes/learner.py).
        Exception: a bug.
    """
    here = Path.cwd()  # before there is an environment, which may move
    options.credentials.require_usable()
    config, agents = with_resolved_id(options.config), options.evaluated
    where = (options.metrics_host, options.metrics_port)
    metrics_tls = protection(*where, tls=options.metrics_tls, insecure=options.insecure)
    torch.set_num_threads(config.train.threads)
    alarm, watch = HangAlarm(asyncio.get_running_loop()), Watch("this evaluator")
    with alarm.watching(watch, timeout_s=config.env.timeout_s), ExitStack() as cleanup:
        schema = _schema(config, watch)
        registry, health = make_registry(), Health(loop_turns())
        cleanup.enter_context(metrics_endpoint(registry, *where, health, tls=metrics_tls))
        metrics = EvaluatorMetrics(registry, agents)
        metrics.expect((Stream.HEARTBEAT, Stream.SUBSCRIBE))
        async with lines_to(options.replay, options.credentials) as lines:
            wanted, node = options.wanted(node_id=""), _node(options.agents)
            guest = await unless(stop, arrived(lines, wanted, schema, node=node))
            if guest is None:
                log.info("stopped before the replay answered")
                return
            member = guest.target.member
            log.info("attending run %s at %s", member.run_id, options.replay)
            if not member.capacity:
                log.info("waiting up to %g s for a learner to join", options.replay_timeout_s)
            path = results_path(options.run_dir, run_id=member.run_id, here=here)
            books = EvaluationBooks(path, agents, config=config, schema=schema, command=options.command)
            cleanup.callback(books.close)
            due = DuePolicies(
                books.evaluated(),
                every=config.eval.every,
                total=config.train.steps,
                skipped=metrics.skipped,
            )
            evaluating = Evaluating(
                due, agents, config=config, schema=schema, journals=books.open, metrics=metrics, watch=watch
            )
            connection = guest.connection(
                timeout_s=options.replay_timeout_s, credentials=options.credentials, metrics=metrics
            )
            following = partial(follow_name, Shards.one(connection), lines)
            work = _Work(
                connection,
                guest,
                books,
                due,
                evaluating,
                metrics,
                agents,
                options.replay_timeout_s,
                following,
            )
            async with guest.farewell(connection):
                with health.ready(), first_cause():
                    await work.run(stop, alarm)


def _schema(config: RunConfig, watch: Watch) -> TransitionSchema:
    """What the run's environment brings about.

    Raises:
        EnvironmentSpecError: it cannot be used.
    """
    env = evaluation_env(config.env, watch)
    try:
        return schema_of(env, config.env.id)
    finally:
        env.close()


def _node(agents: Sequence[int]) -> Attendant:
    one = agents[0] if len(agents) == 1 else None
    return Attendant(secrets.token_hex(8), f"{ROLE}@{platform.node()}", ROLE, one)


@dataclass(frozen=True)
class _Work:
    """The parts of an evaluator that has arrived."""

    connection: Connection
    guest: Guest
    books: EvaluationBooks
    due: DuePolicies
    evaluating: Evaluating
    metrics: EvaluatorMetrics
    agents: Sequence[int]
    patience_s: float
    following: Callable[[], Coroutine[Any, Any, None]]
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, stop: asyncio.Event, alarm: HangAlarm) -> None:
        """Evaluates until nothing is left or `stop`; the compute thread has ended when this ends.

        Raises:
            EnvironmentHangsError: the thread hangs in the environment, and has not ended.
            ExceptionGroup: of what broke a stream.
            Exception: what the compute thread raised, whatever the streams did then.
        """
        halt, how = threading.Event(), "stopped"
        compute = asyncio.ensure_future(asyncio.to_thread(self.evaluating.run, halt))
        try:
            async with asyncio.TaskGroup() as tasks:
                jobs = [
                    self._follow(),
                    self.following(),
                    self.connection.keep(Stream.HEARTBEAT, self._attend),
                    watch_loop_lag(self.metrics.loop_lag.observe),
                ]
                others = [tasks.create_task(job) for job in jobs]
                await unless(stop, alarm.unless_hanging(compute))
                if compute.done():
                    how = "finished"
                for task in others:
                    task.cancel()
        finally:
            halt.set()
            self.due.close()
            await alarm.unless_hanging(compute)
            if (error := compute.exception()) is not None:
                raise error from error.__cause__
        log.info(
            "%s after %s; skipped %d for newer policies; results: %s",
            how,
            several(self.evaluating.count, "evaluation"),
            self.due.skipped,
            self.books.path,
        )

    async def _follow(self) -> None:
        """Takes the policies that arrive, once there is a learner, until cancelled.

        Raises:
            WaitedTooLongError: there has been none for too long.
            RefusalError: see Connection.keep.
        """
        run_id = self.connection.target.member.run_id
        if self.connection.target.member.capacity:  # a learner was there before this node
            self.begun.set()
        try:
            async with asyncio.timeout(self.patience_s):
                await self.begun.wait()
        except TimeoutError:
            raise WaitedTooLongError(
                f"no learner has joined run {run_id} for {self.patience_s:g} s, so this evaluator ends; "
                f"start the learners first, or let it wait longer with --replay-timeout"
            ) from None
        await follow(self.connection, self.agents, self.due.offer)

    async def _attend(self, target: StreamTarget) -> None:
        updates: dict[int, int] = {}
        while True:
            answer = await self.guest.attend(target, self.evaluating.attendance(updates))
            self.books.buffer = answer.buffer
            if answer.buffer.capacity:  # 0 until the first learner has joined
                self.begun.set()
            status = await ClusterClient(target.channel, target.address).status()
            self.connection.up(Stream.HEARTBEAT)
            for agent in status.agents:
                updates[agent.agent_id] = agent.progress.updates
                if agent.agent_id in self.agents:
                    self.due.heard(
                        agent.agent_id,
                        total=agent.progress.total_steps,
                        finished=agent.lease == "left" and agent.progress.state == "finished",
                        version=agent.policy_version if agent.HasField("policy_version") else None,
                    )
            await asyncio.sleep(min(ATTEND_S, target.member.ttl_s / 4))
