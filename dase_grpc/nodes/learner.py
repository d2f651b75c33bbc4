"""The learner node: one agent's training on a thread, its streams to the replay on the event loop."""

import asyncio
import logging
import secrets
import threading
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, Self

import torch

from dase_grpc.config.resolve import RunConfig
from dase_grpc.errors import (
    DaseError,
    DrainingError,
    StaleLeaseError,
    UnreachableError,
)
from dase_grpc.learning.agents.device import pick_device
from dase_grpc.learning.envs.ids import with_resolved_id
from dase_grpc.learning.envs.make import schema_of
from dase_grpc.learning.envs.restarting import exploring_env
from dase_grpc.metrics.endpoint import Health, make_registry, metrics_endpoint
from dase_grpc.metrics.nodes import LearnerMetrics
from dase_grpc.nodes.joined_learner import JoinedLearner, put_together, starved
from dase_grpc.nodes.monitoring import protection
from dase_grpc.nodes.results import open_results, results_path
from dase_grpc.process.alarm import HangAlarm
from dase_grpc.process.lifecycle import run_node
from dase_grpc.process.tasks import first_cause, loop_turns, unless, watch_loop_lag
from dase_grpc.process.watchdog import Watch
from dase_grpc.progress import Progress, several
from dase_grpc.replay.client import draining, joining, patience
from dase_grpc.replay.client.channels import lines_to
from dase_grpc.replay.client.draining import drain, in_time
from dase_grpc.replay.client.finding import follow_name, join_all
from dase_grpc.replay.client.joining import Farewell, leases, require_fit, require_one_piece
from dase_grpc.replay.client.patience import REPLAY_TIMEOUT_S, Wanted
from dase_grpc.replay.client.shards import connected
from dase_grpc.replay.client.waits import say_waits
from dase_grpc.replay.security.dialler import NO_CREDENTIALS, Credentials
from dase_grpc.replay.wire.addresses import ReplayPlace
from dase_grpc.runs.journal import AgentJournal

HEARTBEAT_S: Final = 0.5
log = logging.getLogger("dase")


@dataclass(frozen=True)
class LearnerOptions:
    """What a learner node is told on its command line."""

    replay: ReplayPlace
    config: RunConfig
    agent_id: int | None = None
    gpu: int | None = None
    run_id: str = ""
    run_dir: Path | None = None
    metrics_port: int = 0
    metrics_host: str = "127.0.0.1"
    metrics_tls: Path | None = None
    insecure: bool = False
    command: Sequence[str] = ()
    connect_timeout_s: float = 60.0
    replay_timeout_s: float = REPLAY_TIMEOUT_S
    resume: bool = False
    unfinished_code: int = 0
    credentials: Credentials = NO_CREDENTIALS

    def wanted(self, node_id: str) -> Wanted:
        """What to join; the replay of a learner that resumes has been there, so it counts as away."""
        first_s = max(self.connect_timeout_s, self.replay_timeout_s if self.resume else 0.0)
        return Wanted(
            self.replay.addresses[0],
            self.agent_id,
            self.run_id,
            node_id=node_id,
            timeout_s=first_s,
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
        gpu: int | None,
        run_id: str | None,
        run_dir: Path | None,
        metrics_port: int | None,
        metrics_host: str,
        metrics_tls: Path | None = None,
        insecure: bool,
        command: Sequence[str],
        replay_timeout_s: float | None = None,
        resume: bool = False,
        unfinished_code: int = 0,
        tls: Path | None = None,
        token_file: Path | None = None,
    ) -> Self:
        """Reads the texts of a command line; without a metrics port the configuration's counts.

        Raises:
            AddressError, ConfigError: in one sentence.
        """
        if agent_id is not None:
            joining.require_agent(config, agent_id)
        if metrics_port is None:
            metrics_port = config.metrics.port and config.metrics.port + 1 + (agent_id or 0)
        return cls(
            ReplayPlace.parse(replay),
            config,
            agent_id=agent_id,
            gpu=gpu,
            run_id=run_id or "",
            run_dir=run_dir,
            metrics_port=metrics_port,
            metrics_host=metrics_host,
            metrics_tls=metrics_tls,
            insecure=insecure,
            command=command,
            replay_timeout_s=patience.replay_timeout_s(replay_timeout_s),
            resume=resume,
            unfinished_code=unfinished_code,
            credentials=Credentials(tls, token_file),
        )


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
                    follow=partial(follow_name, lines=lines),
                    starving_s=options.replay_timeout_s,
                    alarm=alarm,
                    resumed=opened.resumed,
                )
                with health.ready():
                    return await _train_to_the_end(session, stop, farewell, journal)


async def _train_to_the_end(
    session: JoinedLearner, stop: asyncio.Event, farewell: Farewell, journal: AgentJournal
) -> bool:
    learner = session.learner
    log.info("results go to %s", session.results)
    try:
        with first_cause():
            await _train(session, stop)
        farewell.reason = f"{learner.progress.state} after {several(learner.progress.step, 'step')}"
        log.info("%s", farewell.reason)
    except DaseError as error:
        farewell.reason = f"failed: {error}"
        gone = (UnreachableError, DrainingError, StaleLeaseError)
        farewell.nothing_to_give_back = isinstance(error, gone)
        if session.link.unacknowledged:
            log.info(
                "%s not acknowledged",
                several(session.link.unacknowledged, "transition was", "transitions were"),
            )
        raise
    except Exception as error:
        farewell.reason = f"failed: {type(error).__name__}: {error}"
        raise
    finally:
        farewell.targets = [each.target for each in session.shards.connections]
        farewell.progress = learner.progress
        if (kept := journal.last_checkpoint) is not None:
            log.info("step %d is kept in %s", int(kept.name.removeprefix("step-")), kept)
        log.info("results: %s", session.results)
    return learner.done


async def _train(session: JoinedLearner, stop: asyncio.Event) -> None:
    """Runs the compute thread beside its streams; the thread has ended when this returns or raises.

    Raises:
        EnvironmentHangsError: the thread hangs in the environment, and has not ended.
        ExceptionGroup: of what broke a stream.
        Exception: what the compute thread raised, whatever the streams did then.
    """
    learner, link, halt = session.learner, session.link, threading.Event()
    compute = asyncio.ensure_future(asyncio.to_thread(learner.train, halt))
    try:
        async with asyncio.TaskGroup() as tasks:
            inserting = tasks.create_task(link.insert_rows())
            jobs = [
                link.fetch_batches(),
                watch_loop_lag(session.metrics.loop_lag.observe),
                say_waits(lambda: link.wait, count=session.metrics.waited),
                session.shards.heartbeats(partial(_progress, session), every_s=HEARTBEAT_S),
                session.exchange.run(),
                session.follow(),
                starved(session),
            ]
            others = [tasks.create_task(job) for job in jobs]
            await unless(stop, session.alarm.unless_hanging(compute))
            halt.set()
            link.stop_batches()
            await _drain(compute, inserting, session, stop)
            for task in others:
                task.cancel()
    finally:
        halt.set()
        link.close()
        await session.alarm.unless_hanging(compute)
        if (error := compute.exception()) is not None:
            raise error from error.__cause__


async def _drain(
    compute: "asyncio.Future[None]",
    inserting: "asyncio.Task[None]",
    session: JoinedLearner,
    stop: asyncio.Event,
) -> None:
    """Lets the compute thread end, then the last rows be acknowledged and the last policy arrive.

    Raises:
        UnreachableError: the replay takes no rows or no policy any more.
        Exception: what the compute thread raised.
    """
    shards = session.shards
    await drain(compute, inserting, link=session.link, shards=shards, alarm=session.alarm, stop=stop)
    async with asyncio.TaskGroup() as tasks:
        flushing = tasks.create_task(session.exchange.flush())
        if not await in_time(flushing, shards, stop):
            raise UnreachableError(
                f"the replay service has not taken the last policy within {draining.DRAIN_S:g} s"
            )


def _progress(session: JoinedLearner) -> Progress:
    """The learner's progress, or what it waits for."""
    learner, wait = session.learner, session.link.wait
    progress = replace(learner.progress, step=learner.steps)  # the rest is as of every 50th update
    session.metrics.unacknowledged.set(session.link.unacknowledged)
    if (environment := session.watch.waiting) is not None:
        return replace(progress, state=f"waiting: {environment}")
    if wait is None:
        return progress
    return replace(progress, state=wait.state)
