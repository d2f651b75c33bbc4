"""A learner that has joined a run, put together with its streams."""

import asyncio
import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from dase_grpc import seeding
from dase_grpc.config.resolve import RunConfig
from dase_grpc.learning.agents.device import reserved_bytes
from dase_grpc.learning.envs.restarts import RestartableEnv
from dase_grpc.learning.training.build import build_learner, pairing, peer_of
from dase_grpc.learning.training.learner import Learner
from dase_grpc.learning.training.publishing import Audience
from dase_grpc.metrics.nodes import LearnerMetrics
from dase_grpc.nodes.followed import tensor_exchange
from dase_grpc.nodes.results import Resumed
from dase_grpc.process.lifecycle import HangAlarm
from dase_grpc.process.watchdog import Watch
from dase_grpc.progress import several
from dase_grpc.replay.client.channels import Lines
from dase_grpc.replay.client.collected import CollectedSteps, Starving
from dase_grpc.replay.client.connection import Connection, Stream
from dase_grpc.replay.client.learner_streams import LearnerStreams
from dase_grpc.replay.client.link import ReplayLink
from dase_grpc.replay.client.policies import PolicyExchange
from dase_grpc.replay.client.shards import Shards
from dase_grpc.replay.client.waits import WaitReason
from dase_grpc.runs.journal import AgentJournal

STARVED_LOOK_S: Final = 0.5

log = logging.getLogger("dase")


@dataclass(frozen=True)
class JoinedLearner:
    """A learner that has joined a run, and what it is connected to.

    Attributes:
        needed: transitions the agent stores before its first update, and again when the buffer was lost.
        starving_s: how long the agent's actors may collect nothing while the learner waits for them.
        stored_before: transitions it had stored when it was resumed.
    """

    streams: LearnerStreams
    learner: Learner
    metrics: LearnerMetrics
    results: Path
    watch: Watch
    alarm: HangAlarm
    needed: int
    collected: CollectedSteps | None
    starving_s: float
    stored_before: int = 0

    def refill_if_short(self) -> None:
        """Lets the agent explore without updates where the buffer is as good as empty for it.

        That is where it holds less than the agent's first update needs, and less than the agent has stored.
        What the agent has not sent yet counts as held. Call on the event loop.
        """
        link = self.streams.link
        held = self.streams.shards.buffer_size + link.unacknowledged
        stored = max(self.stored_before, self.learner.stored)
        if held >= min(self.needed, stored):
            return
        link.begin_anew()
        self.learner.refill()
        log.warning(
            "the buffer holds %s, so updates begin once this agent has stored %d new ones",
            several(held, "transition"),
            self.needed,
        )


def put_together(
    shards: Shards,
    *,
    config: RunConfig,
    env: RestartableEnv,
    device: torch.device,
    journal: AgentJournal,
    metrics: LearnerMetrics,
    results: Path,
    alarm: HangAlarm,
    resumed: Resumed | None,
    lines: Lines,
    starving_s: float,
) -> JoinedLearner:
    """Puts the learner, which may go on from a checkpoint, and its streams together; none is open yet."""
    target = shards.first.target
    agent_id = target.member.agent_id
    own = config.for_agent(agent_id)
    collected = None if config.train.explore else _collected(shards.first, own, resumed)
    link = ReplayLink(
        shards,
        batch_size=own.agent.batch_size,
        prefetch=config.replay.prefetch,
        writer_id=f"learner-{agent_id}",
        own_rows_only=not config.shares_experience,
        rng=seeding.generator(config.train.seed, seeding.Purpose.SHARDS, agent_id),
        collected=collected,
        count_acknowledged=metrics.acknowledged.inc,
    )
    metrics.expect(streams=Stream, waits=WaitReason)
    metrics.prefetched.set_function(lambda: link.prefetched)
    metrics.gpu_memory.set_function(partial(reserved_bytes, device))
    paired = not config.shares_experience
    exchange = tensor_exchange(shards.first, follow=[peer_of(agent_id)] if paired else [])
    learner = build_learner(
        own,
        target.schema,
        env=env,
        agent_id=agent_id,
        device=device,
        sink=link,
        source=link,
        journal=journal,
        metrics=metrics,
        pair=pairing(config, agent_id, exchange) if paired else None,
        audience=None if paired else _audience(exchange, shards.first, config),
        actor_steps=collected,
    )
    exchange.steps = lambda: learner.steps
    session = JoinedLearner(
        LearnerStreams(shards, link, exchange, lines),
        learner,
        metrics,
        results,
        env.watch,
        alarm,
        needed=own.agent.stored_before_updates,
        collected=collected,
        starving_s=starving_s,
        stored_before=0 if resumed is None else resumed.stored,
    )
    if resumed is not None:
        learner.resume(resumed.saved, elapsed_s=resumed.elapsed_s)
        session.refill_if_short()
    shards.on_restart(session.refill_if_short)
    return session


async def starved(session: JoinedLearner) -> None:
    """Ends a learner whose actors collect nothing any more; returns at once where it has none.

    Raises:
        WaitedTooLongError: they have not for too long, and it waits for them.
    """
    if session.collected is None:
        return
    shards, link = session.streams.shards, session.streams.link
    starving = Starving(agent_id=shards.first.target.member.agent_id, limit_s=session.starving_s)
    while True:
        served = shards.complete  # else the wait for the replay has a limit of its own
        starving.look(
            (session.collected.collected, session.learner.progress.updates, link.prefetched),
            waiting=served and link.starved,
        )
        await asyncio.sleep(STARVED_LOOK_S)


def _collected(connection: Connection, config: RunConfig, resumed: Resumed | None) -> CollectedSteps:
    """What the agent's actors collect, counted on where the agent goes on with the same buffer."""
    make = partial(
        CollectedSteps,
        connection,
        train=config.train,
        first_steps=config.agent.stored_before_updates,
    )
    if resumed is None or resumed.origin.buffer_id != connection.target.member.buffer_id:
        return make()
    return make(origin=resumed.origin, used=resumed.used)


def _audience(exchange: PolicyExchange[Any, Any], connection: Connection, config: RunConfig) -> Audience:
    """Who follows the agent's policy."""
    return Audience(
        exchange,
        lambda: connection.followers > 0,
        config.policy.publish_every,
        always_when_due=config.eval.by == "evaluator",
    )
