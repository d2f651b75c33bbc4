"""The wait of a node that ends for what its replay has still to take, and its limit."""

import asyncio
from typing import Any, Final

from dase_grpc.errors import UnreachableError
from dase_grpc.process.lifecycle import HangAlarm, is_orphaned
from dase_grpc.replay.client.insert import RowLink
from dase_grpc.replay.client.shards import Shards

DRAIN_S: Final = 15.0
"""How long the replay may take, at the end, for accepting the rows queued, acknowledging them, a policy."""

ORPHAN_DRAIN_S: Final = 2.0
"""The same for each of these once the launcher is gone, whether the replay serves or not."""

FAILED_DRAIN_S: Final = 2.0
"""The same for the rows of a node whose thread has failed."""

LOOK_S: Final = 0.25


async def drain(
    thread: "asyncio.Future[None]",
    inserting: "asyncio.Task[None]",
    *,
    link: RowLink,
    shards: Shards,
    alarm: HangAlarm,
    stop: asyncio.Event,
    over: asyncio.Event | None = None,
) -> None:
    """Lets the node's thread end, then the last rows be acknowledged, unless it is `over` and none counts.

    What a thread collected before it failed is sent, too, if the replay takes it soon.

    Raises:
        UnreachableError: the replay takes no rows any more.
        Exception: what the thread raised.
    """
    if not await in_time(thread, shards, stop, over=over):
        link.close()  # it evaluates, or waits for room in a queue that is stuck
        await alarm.unless_hanging(thread)
    link.no_more_rows()
    if thread.exception() is not None:
        await asyncio.wait({inserting}, timeout=FAILED_DRAIN_S)
        thread.result()
    taken = await in_time(inserting, shards, stop, over=over)
    if over is not None and over.is_set():
        inserting.cancel()
        return
    if not taken or link.unacknowledged:
        raise UnreachableError(
            f"the replay service has not acknowledged {link.unacknowledged} transitions within {DRAIN_S:g} s"
        )


async def in_time(
    work: "asyncio.Future[Any]", shards: Shards, stop: asyncio.Event, *, over: asyncio.Event | None = None
) -> bool:
    """Waits for the work, up to `DRAIN_S` of the time that the replay serves; whether it is done.

    Once `over` is set it is not waited for any longer.

    How long the replay may be away is the connection's to limit; it is briefly, once `stop` is set, and
    `ORPHAN_DRAIN_S` at most where the launcher is gone.
    """
    left_s, hurry_s = DRAIN_S, ORPHAN_DRAIN_S
    while not work.done() and left_s > 0 and hurry_s > 0 and (over is None or not over.is_set()):
        shards.note_stopping(stopping=stop.is_set())
        look_s = min(LOOK_S, left_s)
        await asyncio.wait({work}, timeout=look_s)
        if shards.complete:
            left_s -= look_s
        if is_orphaned(stop):
            hurry_s -= look_s
    return work.done()
