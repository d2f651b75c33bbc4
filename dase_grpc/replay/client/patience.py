"""Patience with a replay that is away: asked again and again until a limit, and said in the log."""

import asyncio
import logging
import platform
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, NoReturn, TypeVar

from dase_grpc.errors import DrainingError, OverloadedError, RefusalError, UnreachableError
from dase_grpc.pace import Backoff
from dase_grpc.replay.client.cluster import require_let_in
from dase_grpc.replay.client.handoff import USUAL, Times
from dase_grpc.replay.security.dialler import NO_CREDENTIALS, Credentials
from dase_grpc.replay.wire.addresses import Address, silence_of

log = logging.getLogger("dase")

NODE_NAME: Final = f"learner@{platform.node()}"
SHORTEST_CALL_S: Final = 0.1
LONGEST_CALL_S: Final = 3_600.0
"""What a longer wait is made of: gRPC takes a deadline in centuries, or never, for one that has passed."""

LOOK_AT_CREDENTIALS_S: Final = 5.0

T = TypeVar("T")

AWAY: Final = (UnreachableError, OverloadedError, DrainingError)
"""What a replay that does not serve just now answers, if it does."""


@dataclass(frozen=True)
class Wanted:
    """What a node asks for: an agent id (None for the next free) of a run ("" for any) at a replay.

    A replay is waited for for `timeout_s` if it has not answered yet, and for `away_s` if it has, if only
    that it does not serve just now. `ended_node_id` is the agent's node before this one, if that has
    certainly ended.
    """

    replay: Address
    agent_id: int | None
    run_id: str
    node_id: str
    timeout_s: float
    away_s: float
    credentials: Credentials = NO_CREDENTIALS
    timing: Times = USUAL
    ended_node_id: str = ""


async def patiently(ask: Callable[[float], Awaitable[T]], wanted: Wanted) -> T:
    """What `ask` gives, which is told how long it may take; asks again while the replay is away."""
    patience = _Patience(wanted)
    while True:
        asking = asyncio.ensure_future(ask(patience.left_s))
        try:
            done, _ = await asyncio.wait({asking}, timeout=wanted.timing.say_silent_after_s)
            if not done:
                patience.say_silent(await silence_of(wanted.replay))
                await _unless_shut_out(asking, wanted)
            return await asking
        except AWAY as error:
            pause_s = patience.pause_s(error)
        finally:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await asyncio.sleep(pause_s)


class _Patience:
    """How long a replay that is away is asked again, and what is said of it meanwhile."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._limit_s = wanted.timeout_s
        self._began = time.monotonic()
        self._backoff = Backoff(random.Random())
        self._answered = self._said = False
        self._why = ""

    @property
    def left_s(self) -> float:
        """How many seconds a call that has not been made may take of those that are left."""
        return min(max(SHORTEST_CALL_S, self._limit_s - self._lasted_s), LONGEST_CALL_S)

    @property
    def _lasted_s(self) -> float:
        return time.monotonic() - self._began

    @property
    def _remedy(self) -> str:
        return f"start it with `dase node --role replay --listen {self._wanted.replay}`"

    def say_silent(self, why: str) -> None:
        """Says that nothing has come, and why if that is known, unless anything has been said."""
        self._why = why and f": {why}"
        if not self._said:
            within, replay = f"{self._limit_s:g} s", f"{self._wanted.replay}{self._why}"
            log.info("waiting up to %s for the replay service at %s; %s", within, replay, self._remedy)
        self._said = True

    def pause_s(self, error: RefusalError) -> float:
        """How long to wait before the next call. RefusalError if it has been long enough."""
        if not isinstance(error, UnreachableError):
            self._answered, self._limit_s = True, self._wanted.away_s
        left_s = self._limit_s - self._lasted_s
        if left_s <= 0:
            raise self._gave_up(error) from error
        if self._answered and not self._said:
            log.info("%s; trying again for up to %g s", error, self._limit_s)
            self._said = True
        return min(self._backoff.next_s(), left_s)

    def _gave_up(self, error: RefusalError) -> RefusalError:
        if self._answered:
            lasted = f"gave up after {self._lasted_s:.0f} s: " if self._limit_s else ""
            return type(error)(f"{lasted}{error}")
        return UnreachableError(
            f"the replay service at {self._wanted.replay} does not answer (waited up to "
            f"{self._limit_s:g} s){self._why}; {self._remedy}, or give its address with --replay"
        )


async def _unless_shut_out(asking: "asyncio.Future[Any]", wanted: Wanted) -> None:
    """Waits for an answer; UnauthenticatedError if it is the credentials that keep it away."""
    looking = asyncio.ensure_future(_look_at_credentials(wanted))
    try:
        either: set[asyncio.Future[Any]] = {asking, looking}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            await looking
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)  # it may have failed in the same moment


async def _look_at_credentials(wanted: Wanted) -> NoReturn:
    while True:
        await require_let_in(wanted.replay, wanted.credentials)
        await asyncio.sleep(LOOK_AT_CREDENTIALS_S)
