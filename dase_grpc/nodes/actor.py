"""The actor node: explores by the policy of an agent that another node trains, and stores what it sees."""

import asyncio
import logging
import platform
import secrets
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import torch

from dase_grpc.config.resolve import RunConfig
from dase_grpc.learning.envs.ids import with_resolved_id
from dase_grpc.learning.envs.make import schema_of
from dase_grpc.learning.envs.restarts import RestartableEnv, exploring_env
from dase_grpc.learning.training.acting import Acting, Rollout, actor_explorers
from dase_grpc.metrics.endpoint import Health, make_registry, metrics_endpoint
from dase_grpc.metrics.nodes import ActorMetrics
from dase_grpc.nodes.followed import FollowedPolicy
from dase_grpc.nodes.monitoring import protection
from dase_grpc.nodes.options import ActorOptions
from dase_grpc.nodes.troupe import Troupe, explore_to_the_end
from dase_grpc.process.lifecycle import HangAlarm, run_node
from dase_grpc.process.tasks import loop_turns, unless
from dase_grpc.process.watchdog import Watch
from dase_grpc.progress import Attendant
from dase_grpc.replay.client.attending import ActorConnection, AgentFinished, attend
from dase_grpc.replay.client.channels import lines_to, require_let_in
from dase_grpc.replay.client.connection import Stream
from dase_grpc.replay.client.finding import enter_all, follow_name
from dase_grpc.replay.client.insert import RowLink
from dase_grpc.replay.client.shards import Shards
from dase_grpc.replay.client.waits import WaitReason

log = logging.getLogger("dase")


def actor_main(options: ActorOptions, *, stdin_is_leash: bool) -> int:
    """Runs an actor node as a process."""
    return run_node("actor", lambda stop: run_actor(options, stop), stdin_is_leash=stdin_is_leash)


async def run_actor(options: ActorOptions, stop: asyncio.Event) -> None:
    """Explores until `stop` or until the agent has finished; every transition is acknowledged then.

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
            wanted = options.wanted(node.node_id, options.agent_id)
            asking = enter_all(lines, wanted, schema, enter=enter, entered=[])
            try:
                let_in = await unless(stop, asking)
            except AgentFinished as finished:
                log.info("%s, so this actor ends; resume its learner before you start one", finished)
                return
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
                    look_why_away=partial(require_let_in, address, options.credentials),
                )
                for target, address in zip(let_in.targets, let_in.addresses, strict=True)
            ]
            troupe = put_together(
                connections, envs=envs, config=config, node=node, metrics=metrics, watch=watch, alarm=alarm
            )
            with health.ready():
                await explore_to_the_end(
                    troupe, options.replay_timeout_s, stop, partial(follow_name, troupe.shards, lines)
                )


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
