"""The replay node: the shared buffer, the leases and the policies of a run behind their services."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from dase_grpc.nodes.listener import Announce, Listener, listener_main
from dase_grpc.nodes.replay_options import ReplayOptions
from dase_grpc.process.ends import boot_id, files_short_of
from dase_grpc.process.lifecycle import is_orphaned
from dase_grpc.process.tasks import watch_loop_lag
from dase_grpc.progress import several
from dase_grpc.replay.buffer.directory import note_settings
from dase_grpc.replay.buffer.run import SharedRun
from dase_grpc.replay.buffer.sharding import WHOLE
from dase_grpc.replay.service.cluster import ClusterServicer
from dase_grpc.replay.service.monitor import LeaseWatch, ReplayMonitor
from dase_grpc.replay.service.policies import PolicyServicer
from dase_grpc.replay.service.server import MAX_CONNECTIONS, ReplayServicer, add_replay, make_server
from dase_grpc.replay.service.streams import Streams
from dase_grpc.replay.wire.v1 import cluster_pb2, cluster_pb2_grpc, policy_pb2, policy_pb2_grpc, replay_pb2

ORPHAN_LINGER_S: Final = 3.0
"""How long a replay whose launcher is gone lets its learners, who are told so too, send what is left."""

ORPHAN_LOOK_S: Final = 0.1
DESCRIPTORS: Final = (
    replay_pb2.DESCRIPTOR.services_by_name["ReplayService"],
    cluster_pb2.DESCRIPTOR.services_by_name["ClusterService"],
    policy_pb2.DESCRIPTOR.services_by_name["PolicyService"],
)
SERVICES: Final = tuple(service.full_name for service in DESCRIPTORS)

FILES_BESIDE: Final = 100
"""That a replay has open beside its connections, and more than these."""

log = logging.getLogger("dase")


def replay_main(options: ReplayOptions, *, stdin_is_leash: bool) -> int:
    """Runs a replay node as a process; prints its address on stdout once it answers."""
    part = "" if options.shard == WHOLE else f", shard {options.shard}"
    about = f"run {options.run_id}, capacity {options.capacity}{part}"
    return listener_main("replay", partial(run_replay, options), about, stdin_is_leash=stdin_is_leash)


async def run_replay(options: ReplayOptions, stop: asyncio.Event, announce: Announce) -> None:
    """Serves the run until `stop`; then refuses new work, ends all streams and returns.

    `announce` is called with the real address once the service answers. AddressError if that is in use, or
    not private and neither `tls` nor `insecure` is set; or that of the Prometheus endpoint.
    """
    listener = Listener.of(options)
    with shared_run(options) as run:
        await _serve(run, options, stop, announce, listener)
    log.info("stopped; %s", _summary(run))


@contextmanager
def shared_run(options: ReplayOptions) -> Iterator[SharedRun]:
    """The run in memory or, with a data directory, on disk; at the end of the block the disk has it all."""
    run = SharedRun(
        options.run_id,
        capacity=options.capacity,
        min_size=options.min_size,
        seed=options.seed,
        ttl_s=options.lease_ttl_s,
        shard=options.shard,
    )
    if options.data_dir is None:
        yield run
        return
    run.keep_in(options.data_dir, boot_id=boot_id(), now=time.monotonic())
    log.info("%s", _restored(run, options.data_dir))
    settings = {
        "--min-size": options.min_size,
        "--seed": options.seed,
        "--sync-every": options.sync_every_s,
        "the leases' ttl": options.lease_ttl_s,
    }
    for difference in note_settings(options.data_dir, settings):
        log.info("started with other settings than the last time: %s", difference)
    try:
        yield run
    finally:
        run.close()


async def _serve(
    run: SharedRun,
    options: ReplayOptions,
    stop: asyncio.Event,
    announce: Announce,
    listener: Listener[ReplayOptions],
) -> None:
    if (few := files_short_of(MAX_CONNECTIONS + FILES_BESIDE)) is not None:
        log.warning("%s: nodes beyond that cannot connect", few)
    monitor = ReplayMonitor(run, DESCRIPTORS)
    server = make_server(monitor.calls, listener.door)
    replay, policies = ReplayServicer(run, calls=monitor.calls), PolicyServicer(run)
    cluster = ClusterServicer(run, clock=time.monotonic, on_event=log.info, started_at=time.monotonic())
    add_replay(replay, server)
    cluster_pb2_grpc.add_ClusterServiceServicer_to_server(cluster, server)
    policy_pb2_grpc.add_PolicyServiceServicer_to_server(policies, server)
    streams = replay.streams, policies.streams
    monitor.open_streams = lambda: streams[0].open_streams | streams[1].open_streams
    monitor.door_state = listener.door_state

    def drain() -> None:
        cluster.draining = True
        for each in streams:
            each.drain()

    async with listener.serving(server, SERVICES, monitor.registry, announce=announce, drain=drain):
        await _until(stop, run, [listener.watch_door(), *_watches(run, options, streams, monitor)])


def _watches(
    run: SharedRun,
    options: ReplayOptions,
    streams: Sequence[Streams],
    monitor: ReplayMonitor,
) -> Iterator[Coroutine[Any, Any, None]]:
    """What goes on beside the services."""
    yield _watch_leases(run, streams, options)
    yield watch_loop_lag(monitor.loop_lag.observe)
    if options.data_dir is not None:
        yield _sync(run, options.sync_every_s, monitor.synced)


async def _until(stop: asyncio.Event, run: SharedRun, jobs: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Runs jobs until `stop` and, where the launcher is gone, until all learners have left or soon after."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(job) for job in jobs]
        await stop.wait()
        if is_orphaned(stop):
            with suppress(TimeoutError):
                await asyncio.wait_for(_all_have_left(run), ORPHAN_LINGER_S)
        for job in running:
            job.cancel()


async def _watch_leases(run: SharedRun, streams: Sequence[Streams], options: ReplayOptions) -> None:
    watch = LeaseWatch(run)
    while True:
        now = time.monotonic()
        watch.look(now)
        for each in streams:
            each.look()
        run.attendance.forget_silent(now)
        await asyncio.sleep(options.lease_check_s)


async def _all_have_left(run: SharedRun) -> None:
    while any(lease.state(time.monotonic()) == "live" for lease in run.leases.all()):  # noqa: ASYNC110
        await asyncio.sleep(ORPHAN_LOOK_S)


async def _sync(
    run: SharedRun,
    every_s: float,
    done: Callable[[float], None],
    *,
    clock: Callable[[], float] = time.time,
) -> None:
    """Brings what is committed to the disk, again and again; the event loop goes on meanwhile.

    `done` is told when each round began.
    """
    while True:
        await asyncio.sleep(every_s)
        began = clock()
        for blocking in run.sync():
            await asyncio.to_thread(blocking)
        done(began)


def _restored(run: SharedRun, data_dir: Path) -> str:
    found = run.recovery
    if found is None:
        return f"{data_dir} holds no buffer yet; the first learner to join brings it about"
    held = [f"{lease.agent_id} (epoch {lease.epoch})" for lease in run.leases.all() if not lease.left_because]
    stopped = (
        f"; the machine was stopped or the disk refused since, so this is what it surely had, without "
        f"{several(found.unsure, 'older transition')} that may have been written over"
        if found.machine_stopped
        else ""
    )
    return (
        f"restored run {run.run_id} from {data_dir}: {several(found.transitions, 'transition')} of "
        f"{several(found.writers, 'writer')}; leases of agents {', '.join(held) or 'none'} wait for "
        f"their holders{stopped}"
    )


def _summary(run: SharedRun) -> str:
    if not run.opened:
        return "no learner had joined"
    now = time.monotonic()
    live = [str(lease.agent_id) for lease in run.leases.all() if lease.state(now) == "live"]
    one = len(live) == 1
    told = (
        f"{'agent' if one else 'agents'} {', '.join(live)} {'was' if one else 'were'} still training and "
        f"{'has' if one else 'have'} been told"
        if live
        else "no agent was left"
    )
    return f"the buffer held {several(len(run.store.ring), 'transition')}, {told}"
