"""The evaluator node: takes evaluation off the learners, by the same protocol and into the same files."""

import asyncio
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

from dase_grpc.errors import ConfigError, DivergedError, Halted, RefusalError, WaitedTooLongError
from dase_grpc.learning.agents.device import pick_device
from dase_grpc.learning.agents.policy import policy_tensors
from dase_grpc.learning.agents.registry import load_policy
from dase_grpc.learning.envs.evaluation import Evaluation
from dase_grpc.learning.envs.explorer import Policy as Acting
from dase_grpc.learning.envs.restarts import WatchedEnv, evaluation_env
from dase_grpc.learning.training.build import build_evaluator
from dase_grpc.learning.training.parts import StoppablePolicy
from dase_grpc.metrics.nodes import EvaluatorMetrics
from dase_grpc.nodes.followed import DuePolicies, unpacked
from dase_grpc.nodes.frame import NodeFrame, attendant, framed
from dase_grpc.nodes.options import EvaluatorOptions
from dase_grpc.nodes.results import EvaluationBooks, results_path
from dase_grpc.process.containment import Contained
from dase_grpc.process.lifecycle import run_node
from dase_grpc.process.tasks import watch_loop_lag
from dase_grpc.progress import Attendance, number, several
from dase_grpc.replay.buffer.policies import PolicyBytes
from dase_grpc.replay.client.admission import attend, enter_first
from dase_grpc.replay.client.compute import Compute
from dase_grpc.replay.client.connection import Stream
from dase_grpc.replay.client.discovery import follow_name
from dase_grpc.replay.client.membership import EvaluatorConnection
from dase_grpc.replay.client.policies import follow
from dase_grpc.replay.client.shards import Shards
from dase_grpc.replay.wire.v1 import cluster_pb2, replay_pb2

ROLE: Final = "evaluator"

log = logging.getLogger("dase")


def evaluator_main(options: EvaluatorOptions, *, stdin_is_leash: bool) -> int:
    """Runs an evaluator node as a process."""
    return run_node(ROLE, lambda stop: run_evaluator(options, stop), stdin_is_leash=stdin_is_leash)


async def run_evaluator(options: EvaluatorOptions, stop: asyncio.Event) -> None:
    """Evaluates until each agent has ended and its last policy is evaluated, or until `stop`.

    An evaluation that is under way at `stop` is dropped. With --stay it returns at `stop` only.
    """
    agents = options.evaluated
    async with framed(options, stop, "this evaluator", make=evaluation_env, keeps_envs=False) as frame:
        metrics = EvaluatorMetrics(frame.registry, agents)
        metrics.expect((Stream.HEARTBEAT, Stream.SUBSCRIBE))
        node = attendant(ROLE, options.agents[0] if len(options.agents) == 1 else None)
        enter = partial(attend, node=node)
        asking = enter_first(frame.lines, options.wanted(node_id=""), frame.schema, enter=enter)
        joined = await frame.unless_stopped(asking, before="the replay answered")
        if joined is None:
            return
        member = joined.targets[0].member
        log.info("attending run %s at %s", member.run_id, options.replay)
        if not member.capacity:
            log.info("waiting up to %g s for a learner to join", options.replay_timeout_s)
        path = results_path(options.run_dir, run_id=member.run_id, here=frame.here)
        books = EvaluationBooks(path, agents, frame.config, frame.schema, options.command)
        frame.cleanup.callback(books.close)
        (connection,) = frame.connected(joined, EvaluatorConnection, node=node, metrics=metrics)
        work = EvaluatorNode(frame, connection, books, agents, metrics)
        try:
            with frame.health.ready():
                await work.run()
        finally:
            await work.leave()
        await frame.stay()


class EvaluatorNode:
    """An evaluator that has been let in: what comes to it and what is due, on the event loop."""

    def __init__(
        self,
        frame: NodeFrame[WatchedEnv],
        connection: EvaluatorConnection,
        books: EvaluationBooks,
        agents: Sequence[int],
        metrics: EvaluatorMetrics,
    ) -> None:
        self._frame, self._connection, self._books, self._agents = frame, connection, books, agents
        self._metrics = metrics
        config = frame.config
        self._due = DuePolicies(
            books.evaluated(), every=config.eval.every, total=config.train.steps, skipped=metrics.skipped
        )
        self._thread = EvaluatingThread(frame, self._due, books, agents, metrics)
        self._begun = asyncio.Event()
        self._updates: dict[int, int] = {}
        connection.hear = self._hear

    async def run(self) -> None:
        """Evaluates until nothing is left or the node is to stop. Raises: see `Compute.run`."""
        frame, halt, shards = self._frame, threading.Event(), Shards([self._connection])

        def end() -> None:
            halt.set()
            self._due.close()

        thread = asyncio.ensure_future(asyncio.to_thread(self._thread.run, halt))
        finished = await Compute(thread, end, frame.stop, frame.alarm, shards).run(
            [
                self._follow(),
                follow_name(shards, frame.lines),
                self._connection.heartbeats(lambda: self._thread.attendance(self._updates)),
                watch_loop_lag(self._metrics.loop_lag.observe),
            ]
        )
        log.info(
            "%s after %s; skipped %d for newer policies; results: %s",
            "finished" if finished else "stopped",
            several(self._thread.count, "evaluation"),
            self._due.skipped,
            self._books.path,
        )

    async def leave(self) -> None:
        """Says that the node leaves, if somebody is there to hear it."""
        try:
            await self._connection.leave()
        except RefusalError as error:
            log.info("could not say farewell: %s", error)

    async def _follow(self) -> None:
        """Takes policies as they come once there is a learner; WaitedTooLongError if none comes."""
        member, patience_s = self._connection.target.member, self._frame.options.replay_timeout_s
        if member.capacity:  # a learner was there before this node
            self._begun.set()
        try:
            async with asyncio.timeout(patience_s):
                await self._begun.wait()
        except TimeoutError:
            raise WaitedTooLongError(
                f"no learner has joined run {member.run_id} for {patience_s:g} s, so this evaluator ends; "
                f"start the learners first, or let it wait longer with --replay-timeout"
            ) from None
        await follow(self._connection, self._agents, self._due.offer)

    def _hear(self, buffer: replay_pb2.BufferState, status: cluster_pb2.StatusResponse) -> None:
        self._books.buffer = buffer
        if buffer.capacity:  # 0 until the first learner has joined
            self._begun.set()
        for agent in status.agents:
            self._updates[agent.agent_id] = agent.progress.updates
            if agent.agent_id in self._agents:
                self._due.heard(
                    agent.agent_id,
                    total=agent.progress.total_steps,
                    finished=agent.lease == "left" and agent.progress.state == "finished",
                    version=agent.policy_version if agent.HasField("policy_version") else None,
                )


class EvaluatingThread:
    """Evaluates the policies that are due by the run's own protocol, and writes down what comes of it.

    `run` belongs to the compute thread; `attendance` and `count`, of evaluations written down, to any.
    """

    def __init__(
        self,
        frame: NodeFrame[WatchedEnv],
        due: DuePolicies,
        books: EvaluationBooks,
        agents: Sequence[int],
        metrics: EvaluatorMetrics,
    ) -> None:
        self._frame, self._due, self._books, self._metrics = frame, due, books, metrics
        make = partial(evaluation_env, frame.config.env, frame.watch)
        self._evaluators = {
            agent_id: build_evaluator(frame.config, frame.schema, agent_id=agent_id, make=make)
            for agent_id in agents
        }
        self._attendance = Attendance(envs=frame.config.eval.episodes)
        self._latest: PolicyBytes | None = None  # of those evaluated
        self._busy = False
        self._began = 0.0
        self.count = 0

    def run(self, halt: threading.Event) -> None:
        """Evaluates until every agent's last policy is evaluated, `due` is closed, or `halt` is set.

        What is in hand when `halt` is set is dropped. ConfigError if a policy is of other settings.
        """
        self._began = time.perf_counter()
        with Contained(), suppress(Halted):
            while (policy := self._due.take()) is not None:
                self._busy = True
                self._evaluate(policy, halt)
                self._busy = False
                self._due.done(policy)

    def attendance(self, updates: Mapping[int, int]) -> Attendance:
        """What the evaluator is doing; `updates` says how far the learners are."""
        state = "evaluating" if self._busy else "idle: no policy is due"
        if (environment := self._frame.watch.waiting) is not None:
            state = f"waiting: {environment}"
        lag = None
        if (latest := self._latest) is not None and latest.agent_id in updates:
            lag = float(max(0, updates[latest.agent_id] - latest.version))
        return replace(self._attendance, policy_lag_updates=lag, state=state)

    def _evaluate(self, policy: PolicyBytes, halt: threading.Event) -> None:
        name, started = f"agent {policy.agent_id} at step {policy.step:,}", time.perf_counter()
        tensors = policy_tensors(unpacked(policy))
        actor = self._loaded(policy, tensors)
        try:
            result = self._evaluators[policy.agent_id].evaluate(StoppablePolicy(actor, halt, name))
        except DivergedError as error:
            log.warning("%s; it is left out", error)
            return
        now = time.perf_counter()
        self._note(policy, result, tensors, seconds=now - started)
        log.info(
            "%s: evaluation %s (%s, %.1f s)",
            name,
            number(result.return_mean),
            several(result.episodes, "episode"),
            now - started,
        )

    def _note(
        self, policy: PolicyBytes, result: Evaluation, tensors: Mapping[str, Any], *, seconds: float
    ) -> None:
        journal = self._books.open()[policy.agent_id]
        journal.note(
            tensors,
            version=policy.version,
            step=policy.step,
            return_mean=result.return_mean,
            return_std=result.return_std,
            episodes=result.episodes,
            wall_seconds=journal.seconds + time.perf_counter() - self._began,
        )
        self._metrics.evaluated(policy.agent_id, result.return_mean, seconds=seconds)
        self._metrics.restarted(policy.agent_id, result.restarts)
        steps = sum(result.lengths)
        self._attendance = Attendance(
            envs=result.episodes,
            env_steps=self._attendance.env_steps + steps,
            env_steps_per_second=steps / seconds if seconds > 0 else 0.0,
            policy_version=policy.version,
        )
        self._latest = policy
        self.count += 1

    def _loaded(self, policy: PolicyBytes, tensors: Mapping[str, Any]) -> Acting:
        agent = self._frame.config.for_agent(policy.agent_id).agent
        try:
            return load_policy(agent, self._frame.schema, tensors, pick_device(None))
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"policy {policy.version} of agent {policy.agent_id} is not what this evaluator's settings "
                f"say ({error.args[0]}); start it with the settings of the learners"
            ) from None
