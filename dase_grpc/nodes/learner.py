"""The learner node: one agent's training on a thread, its streams to the replay on the event loop."""

import asyncio
import logging
import secrets
import threading
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from dase_grpc.learning.agents.device import pick_device
from dase_grpc.learning.envs.ids import with_resolved_id
from dase_grpc.learning.envs.make import schema_of
from dase_grpc.learning.envs.restarts import exploring_env
from dase_grpc.metrics.endpoint import Health, make_registry, metrics_endpoint
from dase_grpc.metrics.nodes import LearnerMetrics
from dase_grpc.nodes.joined_learner import JoinedLearner, put_together, starved
from dase_grpc.nodes.monitoring import protection
from dase_grpc.nodes.options import LearnerOptions
from dase_grpc.nodes.results import open_results, results_path
from dase_grpc.process.lifecycle import HangAlarm, run_node
from dase_grpc.process.tasks import loop_turns, unless, watch_loop_lag
from dase_grpc.process.watchdog import Watch
from dase_grpc.progress import Progress, several
from dase_grpc.replay.client.channels import lines_to
from dase_grpc.replay.client.finding import join_all
from dase_grpc.replay.client.joining import Farewell, leases, require_fit, require_one_piece
from dase_grpc.replay.client.shards import connected
from dase_grpc.runs.journal import AgentJournal

log = logging.getLogger("dase")


def learner_main(options: LearnerOptions, *, stdin_is_leash: bool) -> int:
    """Runs a learner node as a process; one that was stopped in good order ends with `unfinished_code`."""
    finished = False

    async def main(stop: asyncio.Event) -> None:
        nonlocal finished
        finished = await run_learner(options, stop)

    code = run_node("learner", main, stdin_is_leash=stdin_is_leash)
    return options.unfinished_code if code == 0 and not finished else code


async def run_learner(options: LearnerOptions, stop: asyncio.Event) -> bool:
    """Trains until the budget is spent or `stop`; returns once every transition is acknowledged.

    Returns whether the budget is spent. Leaves a final checkpoint behind, also when the replay is lost, and
    gives the lease back.

    Raises:
        UsageError: the environment, the device, the settings or the run directory cannot be used.
        RefusalError: the replay refused, was lost or is shutting down.
        EnvironmentFailedError: the environment raised, and again whenever it was made anew.
        EnvironmentHangsError: a call into the environment does not return; its thread goes on hanging, so
            the process cannot end but by `ending.end_now`.
        Exception: a bug.
    """
    here = Path.cwd()  # before there is an environment, which may move
    options.credentials.require_usable()
    config = with_resolved_id(options.config)
    where = (options.metrics_host, options.metrics_port)
    metrics_tls = protection(*where, tls=options.metrics_tls, insecure=options.insecure)
    device = pick_device(options.gpu, config.distinct_agents)
    torch.set_num_threads(config.train.threads)
    alarm = HangAlarm(asyncio.get_running_loop())
    watch = Watch("this learner" if options.agent_id is None else f"agent {options.agent_id}")
    with alarm.watching(watch, timeout_s=config.env.timeout_s), ExitStack() as cleanup:
        env = exploring_env(config.env, watch)
        cleanup.callback(env.close)
        schema = schema_of(env, config.env.id)
        registry, health = make_registry(), Health(loop_turns())
        cleanup.enter_context(metrics_endpoint(registry, *where, health, tls=metrics_tls))
        async with lines_to(options.replay, options.credentials) as lines:
            joined = await unless(stop, join_all(lines, options.wanted(secrets.token_hex(8)), schema))
            if joined is None:
                log.info("stopped before joining")
                return False
            member = joined.member
            log.info("joined run %s at %s as agent %d", member.run_id, options.replay, member.agent_id)
            async with leases(joined.targets) as farewell:
                require_fit(config, member)
                require_one_piece(config, shards=len(joined.targets))
                results = results_path(options.run_dir, run_id=member.run_id, here=here)
                opened = open_results(
                    results, config, member, schema, command=options.command, resume=options.resume
                )
                journal = opened.journal
                cleanup.enter_context(closing(journal))
                metrics = LearnerMetrics(registry, member.agent_id)
                session = put_together(
                    connected(
                        joined,
                        lines,
                        timeout_s=options.replay_timeout_s,
                        accept=partial(require_fit, config),
                        metrics=metrics,
                    ),
                    config=config,
                    env=env,
                    device=device,
                    journal=journal,
                    metrics=metrics,
                    results=results,
                    lines=lines,
                    starving_s=options.replay_timeout_s,
                    alarm=alarm,
                    resumed=opened.resumed,
                )
                with health.ready():
                    return await _train_to_the_end(session, stop, farewell, journal)


async def _train_to_the_end(
    session: JoinedLearner, stop: asyncio.Event, farewell: Farewell, journal: AgentJournal
) -> bool:
    learner, link, halt = session.learner, session.streams.link, threading.Event()
    log.info("results go to %s", session.results)
    try:
        await session.streams.run(
            asyncio.ensure_future(asyncio.to_thread(learner.train, halt)),
            stop,
            halt=halt.set,
            progress=partial(_progress, session),
            alarm=session.alarm,
            waited=session.metrics.waited,
            beside=[watch_loop_lag(session.metrics.loop_lag.observe), starved(session)],
        )
        farewell.reason = f"{learner.progress.state} after {several(learner.progress.step, 'step')}"
        log.info("%s", farewell.reason)
    finally:
        if link.unacknowledged:
            lost = several(link.unacknowledged, "transition was", "transitions were")
            log.info("%s not acknowledged", lost)
        farewell.targets = [each.target for each in session.streams.shards.connections]
        farewell.progress = learner.progress
        if (kept := journal.last_checkpoint) is not None:
            log.info("step %d is kept in %s", int(kept.name.removeprefix("step-")), kept)
        log.info("results: %s", session.results)
    return learner.done


def _progress(session: JoinedLearner) -> Progress:
    """The learner's progress, or what it waits for."""
    learner, link = session.learner, session.streams.link
    wait = link.wait
    progress = replace(learner.progress, step=learner.steps)  # the rest is as of every 50th update
    session.metrics.unacknowledged.set(link.unacknowledged)
    if (environment := session.watch.waiting) is not None:
        return replace(progress, state=f"waiting: {environment}")
    if wait is None:
        return progress
    return replace(progress, state=wait.state)
