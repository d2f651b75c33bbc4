"""The learner node: one agent's training on a thread, its streams to the replay on the event loop."""

import asyncio
import logging
import secrets
import threading
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dase_grpc import seeding
from dase_grpc.config.resolve import RunConfig
from dase_grpc.errors import AgentTakenError, WaitedTooLongError
from dase_grpc.learning.agents.device import pick_device, reserved_bytes
from dase_grpc.learning.envs.restarts import RestartableEnv, exploring_env
from dase_grpc.learning.training.build import build_learner, pairing, peer_of
from dase_grpc.learning.training.learner import Learner
from dase_grpc.learning.training.parts import Audience
from dase_grpc.metrics.nodes import LearnerMetrics
from dase_grpc.nodes.followed import tensor_exchange
from dase_grpc.nodes.frame import NodeFrame, framed
from dase_grpc.nodes.options import LearnerOptions
from dase_grpc.nodes.results import Results, Resumed, open_results, results_path
from dase_grpc.process.lifecycle import run_node
from dase_grpc.process.tasks import watch_loop_lag
from dase_grpc.progress import Progress, several
from dase_grpc.replay.buffer.sampling import Sampling
from dase_grpc.replay.client.admission import (
    Farewell,
    Joined,
    join_all,
    leases,
    require_fit,
    require_one_piece,
)
from dase_grpc.replay.client.collected import CollectedSteps
from dase_grpc.replay.client.compute import LearnerStreams
from dase_grpc.replay.client.connection import Connection, Stream
from dase_grpc.replay.client.handoff import Standstill, WaitReason
from dase_grpc.replay.client.link import ReplayLink
from dase_grpc.replay.client.membership import LearnerConnection
from dase_grpc.replay.client.policies import PolicyExchange
from dase_grpc.replay.client.shards import Shards
from dase_grpc.replay.wire.messages import Membership
from dase_grpc.runs.directory import agent_directory
from dase_grpc.runs.lease_note import ended_node_id

log = logging.getLogger("dase")


def learner_main(options: LearnerOptions, *, stdin_is_leash: bool) -> int:
    """Runs a learner node as a process.

    One that was stopped in good order ends with `unfinished_code`. So does one whose agent another learner
    still has, where there is such a code: that learner may be gone when it is started again.
    """
    finished, waits = False, False

    async def main(stop: asyncio.Event) -> None:
        nonlocal finished, waits
        try:
            finished = await run_learner(options, stop)
        except AgentTakenError:
            waits = options.unfinished_code > 0
            raise

    code = run_node("learner", main, stdin_is_leash=stdin_is_leash)
    return options.unfinished_code if waits or (code == 0 and not finished) else code


async def run_learner(options: LearnerOptions, stop: asyncio.Event) -> bool:
    """Trains until the budget is spent or `stop`; returns once every transition is acknowledged.

    Returns whether the budget is spent. Leaves a final checkpoint behind, also when the replay is lost, and
    gives the lease back. With --stay it returns at `stop` only.
    """
    device = pick_device(options.gpu, options.config.distinct_agents)
    owner = "this learner" if options.agent_id is None else f"agent {options.agent_id}"
    async with framed(options, stop, owner, make=exploring_env) as frame:
        wanted = options.wanted(secrets.token_hex(8))
        wanted = replace(wanted, ended_node_id=_ended_before(options, frame.here))
        asking = join_all(frame.lines, wanted, frame.schema)
        joined = await frame.unless_stopped(asking, before="joining")
        if joined is None:
            return False
        member = joined.member
        log.info("joined run %s at %s as agent %d", member.run_id, options.replay, member.agent_id)
        async with leases(joined.targets) as farewell:
            require_fit(frame.config, member)
            require_one_piece(frame.config, shards=len(joined.targets))
            path = results_path(options.run_dir, run_id=member.run_id, here=frame.here)
            results = open_results(
                path, frame.config, member, frame.schema, command=options.command, resume=options.resume
            )
            frame.cleanup.enter_context(closing(results))
            training = put_together(frame, joined, path=path, results=results, device=device)
            with frame.health.ready():
                finished = await training.run(farewell)
        await frame.stay(training.metrics.finished)
        return finished


def _ended_before(options: LearnerOptions, here: Path) -> str:
    """The node id of the agent's learner before this one, where that has certainly ended; else empty."""
    if options.agent_id is None or options.run_dir is None:
        return ""
    directory = agent_directory(here / options.run_dir, options.agent_id)
    node_id = ended_node_id(directory.lease_note)
    if node_id:
        log.info(
            "the learner of agent %d before this one has ended; its lease is not waited for", options.agent_id
        )
    return node_id


@dataclass(frozen=True)
class Training:
    """A learner that has joined a run, and what it is connected to; `path` is where its results lie.

    `needed`: transitions the agent stores before its first update, and again when the buffer was lost.
    """

    frame: NodeFrame[RestartableEnv]
    streams: LearnerStreams
    learner: Learner
    metrics: LearnerMetrics
    path: Path
    results: Results
    needed: int
    collected: CollectedSteps | None

    async def run(self, farewell: Farewell) -> bool:
        """Trains to the end; whether the budget is spent. See `run_learner`."""
        learner, link, frame, halt = self.learner, self.streams.link, self.frame, threading.Event()
        log.info("results go to %s", self.path)
        try:
            await self.streams.run(
                asyncio.ensure_future(asyncio.to_thread(learner.train, halt)),
                frame.stop,
                halt=halt.set,
                progress=self._progress,
                alarm=frame.alarm,
                waited=self.metrics.waited,
                beside=[watch_loop_lag(self.metrics.loop_lag.observe), self._starved()],
            )
            farewell.reason = f"{learner.progress.state} after {several(learner.progress.step, 'step')}"
            log.info("%s", farewell.reason)
        finally:
            if link.unacknowledged:
                lost = several(link.unacknowledged, "transition was", "transitions were")
                log.info("%s not acknowledged", lost)
            farewell.targets = [each.target for each in self.streams.shards.connections]
            farewell.progress = learner.progress
            if (kept := self.results.journal.last_checkpoint) is not None:
                log.info("step %d is kept in %s", int(kept.name.removeprefix("step-")), kept)
            log.info("results: %s", self.path)
        return learner.done

    def refill_if_short(self) -> None:
        """Lets the agent explore without updates where the buffer is as good as empty for it.

        That is where it holds less than the agent's first update needs, and less than the agent has stored.
        What the agent has not sent yet counts as held. Call on the event loop.
        """
        link, resumed = self.streams.link, self.results.resumed
        held = self.streams.shards.buffer_size + link.unacknowledged
        stored = max(0 if resumed is None else resumed.stored, self.learner.stored)
        if held >= min(self.needed, stored):
            return
        link.begin_anew()
        self.learner.refill()
        log.warning(
            "the buffer holds %s, so updates begin once this agent has stored %d new ones",
            several(held, "transition"),
            self.needed,
        )

    def _progress(self) -> Progress:
        learner, link = self.learner, self.streams.link
        wait = link.wait
        progress = replace(learner.progress, step=learner.steps)  # the rest is as of every 50th update
        self.metrics.unacknowledged.set(link.unacknowledged)
        if (environment := self.frame.watch.waiting) is not None:
            return replace(progress, state=f"waiting: {environment}")
        return progress if wait is None else replace(progress, state=wait.state)

    async def _starved(self) -> None:
        """Ends a learner whose actors, if any, collect nothing for too long while it waits for them."""
        if self.collected is None:
            return
        shards, link = self.streams.shards, self.streams.link
        limit_s, agent_id = self.frame.options.replay_timeout_s, shards.first.target.member.agent_id
        standstill = Standstill(limit_s)
        while True:
            served = shards.complete  # else the wait for the replay has a limit of its own
            far = (self.collected.collected, self.learner.progress.updates, link.prefetched)
            if standstill.lasts(far, waiting=served and link.starved):
                raise WaitedTooLongError(
                    f"the actors of agent {agent_id} have collected nothing for {limit_s:g} s, so its "
                    f"learner ends; start one with `dase node --role actor --agent {agent_id}`, or let the "
                    f"learner wait longer with --replay-timeout"
                )
            await asyncio.sleep(shards.first.timing.beat_s)


def put_together(
    frame: NodeFrame[RestartableEnv], joined: Joined, *, path: Path, results: Results, device: torch.device
) -> Training:
    """Puts the learner, which may go on from a checkpoint, and its streams together; none is open yet."""
    metrics = LearnerMetrics(frame.registry, joined.member.agent_id)
    accept = partial(require_fit, frame.config)
    shards = Shards(frame.connected(joined, LearnerConnection, accept=accept, metrics=metrics))
    own, resumed = frame.config.for_agent(joined.member.agent_id), results.resumed
    collected = None if own.train.explore else _collected(shards.first, own, resumed)
    link = _link(shards, frame.config, own=own, collected=collected, metrics=metrics)
    metrics.expect(streams=Stream, waits=WaitReason)
    metrics.prefetched.set_function(lambda: link.prefetched)
    metrics.in_place.set_function(lambda: link.reads_in_place)
    metrics.overwritten.set_function(lambda: link.overwritten)
    metrics.gpu_memory.set_function(partial(reserved_bytes, device))
    paired = not frame.config.shares_experience
    agent_id = joined.member.agent_id
    exchange = tensor_exchange(shards.first, follow=[peer_of(agent_id)] if paired else [])
    learner = build_learner(
        own,
        frame.schema,
        env=frame.envs[0],
        agent_id=agent_id,
        device=device,
        sink=link,
        source=link,
        journal=results.journal,
        metrics=metrics,
        pair=pairing(frame.config, agent_id, exchange) if paired else None,
        audience=None if paired else _audience(exchange, shards.first, frame.config),
        actor_steps=collected,
        stored_since=joined.member.inserted if _goes_on_behind(joined.member, resumed) else 0,
    )
    exchange.steps = lambda: learner.steps
    streams = LearnerStreams(shards, link, exchange, frame.lines)
    needed = own.agent.stored_before_updates
    training = Training(frame, streams, learner, metrics, path, results, needed, collected)
    if resumed is not None:
        learner.resume(resumed.saved, elapsed_s=resumed.elapsed_s)
        training.refill_if_short()
    shards.on_restart(training.refill_if_short)
    return training


def _goes_on_behind(member: Membership, resumed: Resumed | None) -> bool:
    """Whether the buffer holds transitions of the agent from after the checkpoint that it goes on from."""
    return member.inserted > (0 if resumed is None else resumed.stored)


def _link(
    shards: Shards,
    config: RunConfig,
    *,
    own: RunConfig,
    collected: CollectedSteps | None,
    metrics: LearnerMetrics,
) -> ReplayLink:
    agent_id = shards.first.target.member.agent_id
    return ReplayLink(
        shards,
        batch_size=own.agent.batch_size,
        prefetch=config.replay.prefetch,
        writer_id=f"learner-{agent_id}",
        sampling=Sampling.of(config),
        rng=seeding.generator(config.train.seed, seeding.Purpose.SHARDS, agent_id),
        collected=collected,
        in_place=config.replay.in_place,
        count_acknowledged=metrics.acknowledged.inc,
    )


def _collected(connection: Connection, config: RunConfig, resumed: Resumed | None) -> CollectedSteps:
    """What the agent's actors collect, counted on where the agent goes on with the same buffer."""
    make = partial(
        CollectedSteps, connection, train=config.train, first_steps=config.agent.stored_before_updates
    )
    if resumed is None or resumed.origin.buffer_id != connection.target.member.buffer_id:
        return make()
    return make(origin=resumed.origin, used=resumed.used)


def _audience(exchange: PolicyExchange[Any, Any], connection: Connection, config: RunConfig) -> Audience:
    return Audience(
        exchange,
        lambda: connection.followers > 0,
        config.policy.publish_every,
        always_when_due=config.eval.by == "evaluator",
    )
