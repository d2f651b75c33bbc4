"""Reads the Status of a cluster's replays, over channels of an observer's own."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from dase_grpc.errors import DaseError, UnreachableError
from dase_grpc.observe.rates import Look
from dase_grpc.observe.view import ClusterView, merged, view_of
from dase_grpc.replay.security.dialler import NO_CREDENTIALS, Credentials
from dase_grpc.replay.service.cluster import ClusterClient
from dase_grpc.replay.service.server import Address, open_channel, require_let_in
from dase_grpc.wire.probing import silence_of
from dase_grpc.wire.sharded import ReplayPlace


@dataclass(frozen=True)
class Target:
    """The replay or its shards, with what credentials, and how long each is given to answer."""

    replay: ReplayPlace
    credentials: Credentials = NO_CREDENTIALS
    timeout_s: float = 5.0

    @classmethod
    def parse(cls, *, replay: str, tls: Path | None, token_file: Path | None, timeout_s: float) -> Self:
        """Reads the texts of a command line.

        Raises:
            AddressError, CredentialsError: in one sentence.
        """
        credentials = Credentials(tls, token_file)
        credentials.require_usable()
        return cls(ReplayPlace.parse(replay), credentials, timeout_s)


class Observer:
    """Looks at a cluster, as often as asked."""

    def __init__(
        self,
        replays: Mapping[Address, ClusterClient],
        *,
        credentials: Credentials,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replays = replays
        self._credentials = credentials
        self._timeout_s = timeout_s
        self._clock = clock

    async def look(self) -> Look:
        """What all replays say; takes up to the timeout where one does not answer."""
        answers = await asyncio.gather(*map(self._ask, self._replays))
        by_address = dict(zip(map(str, self._replays), answers, strict=True))
        views = [answer for answer in answers if isinstance(answer, ClusterView)]
        return Look(
            self._clock(),
            merged(views) if views else None,
            {address: answer for address, answer in by_address.items() if isinstance(answer, DaseError)},
        )

    async def require_let_in(self) -> None:
        """Asks a replay that did not answer whether it is for the credentials.

        Raises:
            UnauthenticatedError: it is; in one sentence.
        """
        for address in self._replays:
            await require_let_in(address, self._credentials)

    async def say_silence(self) -> None:
        """Asks the operating system about a replay that did not answer.

        Raises:
            UnreachableError: it knows what keeps it from answering.
        """
        for address in self._replays:
            if silence := await silence_of(address):
                raise UnreachableError(
                    f"the replay service at {address} does not answer: {silence}; see whether it runs, and "
                    f"give its address with --replay"
                )

    async def _ask(self, address: Address) -> ClusterView | DaseError:
        try:
            return view_of(await self._replays[address].status(timeout_s=self._timeout_s))
        except DaseError as error:
            return error


@asynccontextmanager
async def observing(target: Target) -> AsyncIterator[Observer]:
    """An observer of a cluster; it connects when it looks.

    Raises:
        CredentialsError: the credentials cannot be used.
        UnreachableError: a name resolves to no address.
    """
    async with AsyncExitStack() as channels:
        clients = {}
        for address in await target.replay.found():
            channel = await channels.enter_async_context(open_channel(address, target.credentials))
            clients[address] = ClusterClient(channel, str(address))
        yield Observer(clients, credentials=target.credentials, timeout_s=target.timeout_s)


async def first_look(observer: Observer) -> Look:
    """A look at which at least one replay answered.

    Raises:
        UnauthenticatedError: the two sides' credentials do not fit.
        UnreachableError: no replay answers.
        RefusalError: they refuse otherwise.
    """
    look = await observer.look()
    if look.cluster is not None:
        return look
    why = next(iter(look.silent.values()))
    if isinstance(why, UnreachableError):
        await observer.require_let_in()
        await observer.say_silence()
    raise why
