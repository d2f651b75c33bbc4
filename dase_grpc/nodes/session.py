"""A learner that has joined a run, put together with its streams."""

from dataclasses import dataclass
from pathlib import Path

import torch

from dase_grpc.config import RunConfig
from dase_grpc.learning.build import build_learner, pairing, peer_of
from dase_grpc.learning.learner import Learner
from dase_grpc.learning.restarting import RestartableEnv
from dase_grpc.learning.watch import Watch
from dase_grpc.nodes.connection import Connection
from dase_grpc.nodes.hanging import HangAlarm
from dase_grpc.nodes.link import ReplayLink
from dase_grpc.nodes.policies import PolicyExchange
from dase_grpc.runs.journal import AgentJournal
from dase_grpc.telemetry import LearnerMetrics


@dataclass(frozen=True)
class Session:
    """A learner that has joined a run, and what it is connected to; only a pair exchanges policies."""

    connection: Connection
    link: ReplayLink
    exchange: PolicyExchange | None
    learner: Learner
    metrics: LearnerMetrics
    results: Path
    watch: Watch
    alarm: HangAlarm


def put_together(
    connection: Connection,
    *,
    config: RunConfig,
    env: RestartableEnv,
    device: torch.device,
    journal: AgentJournal,
    metrics: LearnerMetrics,
    results: Path,
    alarm: HangAlarm,
) -> Session:
    """Puts the learner and its streams together; none of them is open yet."""
    target = connection.target
    agent_id = target.member.agent_id
    own = config.for_agent(agent_id)
    link = ReplayLink(
        connection,
        batch_size=own.agent.batch_size,
        prefetch=config.replay.prefetch,
        writer_id=f"learner-{agent_id}",
        own_rows_only=not config.shares_experience,
        count_acknowledged=metrics.acknowledged.inc,
    )
    exchange = None if config.shares_experience else PolicyExchange(connection, follow=[peer_of(agent_id)])
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
        pair=None if exchange is None else pairing(config, agent_id, exchange),
    )
    return Session(connection, link, exchange, learner, metrics, results, env.watch, alarm)
