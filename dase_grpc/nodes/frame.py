"""Frame: what learners, actors and evaluators all have around their work."""

import asyncio
import logging
import platform
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import ExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from prometheus_client import CollectorRegistry, Gauge

from dase_grpc.config.resolve import RunConfig
from dase_grpc.config.sections import EnvConfig
from dase_grpc.learning.envs.ids import with_resolved_id
from dase_grpc.learning.envs.make import Environment, schema_of
from dase_grpc.metrics.endpoint import Probes, make_registry, metrics_endpoint
from dase_grpc.nodes.options import ClientOptions
from dase_grpc.process.lifecycle import HangAlarm
from dase_grpc.process.tasks import loop_turns, unless
from dase_grpc.process.watchdog import Watch
from dase_grpc.progress import Attendant
from dase_grpc.replay.client.admission import Joined
from dase_grpc.replay.client.cluster import Lines
from dase_grpc.replay.client.connection import Connection
from dase_grpc.replay.client.handoff import USUAL
from dase_grpc.schema import TransitionSchema

T = TypeVar("T")
C = TypeVar("C", bound=Connection)
E = TypeVar("E", bound=Environment)

log = logging.getLogger("dase")


@dataclass(frozen=True)
class NodeFrame(Generic[E]):
    """A node that is to be let in by its replay; closes `cleanup` when it ends, after its channels.

    `here` is the folder that it was started in; an environment may move to another.
    """

    options: ClientOptions
    config: RunConfig
    stop: asyncio.Event
    here: Path
    envs: Sequence[E]
    schema: TransitionSchema
    watch: Watch
    alarm: HangAlarm
    registry: CollectorRegistry
    health: Probes
    lines: Lines
    cleanup: ExitStack

    async def unless_stopped(self, awaited: Coroutine[Any, Any, T], *, before: str) -> T | None:
        """What is awaited; None, and said, where the node is stopped before that."""
        found = await unless(self.stop, awaited)
        if found is None:
            log.info("stopped before %s", before)
        return found

    async def stay(self, finished: Gauge | None = None) -> None:
        """Waits, with --stay, until the node is to stop; it is ready meanwhile, having done its work.

        `finished` is 1 then: who watches has to know rest from standstill.
        """
        if self.options.stay and not self.stop.is_set():
            log.info("nothing is left to do: stays until it is stopped")
            if finished is not None:
                finished.set(1)
            with self.health.ready():
                await self.stop.wait()

    def connected(self, joined: Joined, connect: Callable[..., C], **options: Any) -> list[C]:
        """Connections to the shards that have let the node in; see `Joined.connected`."""
        node = self.options
        return joined.connected(
            self.lines, connect, timeout_s=node.replay_timeout_s, timing=node.timing or USUAL, **options
        )


@asynccontextmanager
async def framed(
    options: ClientOptions,
    stop: asyncio.Event,
    owner: str,
    *,
    make: Callable[[EnvConfig, Watch], E],
    envs: int = 1,
    keeps_envs: bool = True,
) -> AsyncIterator[NodeFrame[E]]:
    """The frame of a node whose environments are `owner`'s; closed at the end of the block.

    Without `keeps_envs` the environments are made for the run's schema alone. EnvironmentHangsError if a call
    into one does not return: its thread goes on hanging, so the process cannot end but by `ends.end_now`.
    """
    here = Path.cwd()
    options.credentials.require_usable()
    config = with_resolved_id(options.config)
    where, tls = (options.metrics_host, options.metrics_port), options.metrics_contexts()
    torch.set_num_threads(config.train.threads)
    alarm, watch = HangAlarm(asyncio.get_running_loop()), Watch(owner)
    with alarm.watching(watch, timeout_s=config.env.timeout_s), ExitStack() as cleanup:
        with ExitStack() as opened:
            made = [opened.enter_context(closing(make(config.env, watch))) for _ in range(envs)]
            schema = schema_of(made[0], config.env.id)
            if keeps_envs:
                cleanup.enter_context(opened.pop_all())
        registry, health = make_registry(), Probes(loop_turns())
        cleanup.enter_context(metrics_endpoint(registry, *where, health, tls=tls, remedy=options.port_remedy))
        async with Lines(options.replay, options.credentials) as lines:
            yield NodeFrame(
                options, config, stop, here, made, schema, watch, alarm, registry, health, lines, cleanup
            )


def attendant(role: str, agent_id: int | None) -> Attendant:
    """A node without a lease; its id is random and of this process alone."""
    return Attendant(secrets.token_hex(8), f"{role}@{platform.node()}", role, agent_id)
