"""A caller's side of security: channels with TLS, made anew when files change, and signed calls."""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Self

import grpc

from dase_grpc.errors import CredentialsError, UnauthenticatedError, UsageError
from dase_grpc.replay.security.folders import Live, TlsFiles, TlsFolder, live_files
from dase_grpc.replay.security.selfcheck import require_accepted, why_not
from dase_grpc.replay.security.tokens import TOKEN_KEY, Secret, live_secret, sign

Call = Any  # grpc.aio's calls, of four kinds


@cache
def _dialled_in() -> int:
    """The process that made the first channel: this one, or the one it was forked from."""
    return os.getpid()


def require_not_forked() -> None:
    """Checks that gRPC's threads, which no fork takes along, are here: a call would wait for them for ever.

    Raises:
        UsageError: they are in the process that this one was forked from.
    """
    if _dialled_in() != os.getpid():
        raise UsageError(
            "this process was forked from one that has connected already, which gRPC cannot go on from; "
            'start processes by "spawn", or connect for the first time after the fork'
        )


@dataclass(frozen=True)
class Credentials:
    """Where a caller's credentials lie: its own certificate, or a token and whom to trust."""

    tls: Path | None = None
    token_file: Path | None = None

    def require_usable(self) -> None:
        """Checks the files before anything is started; a CredentialsError says what cannot be used."""
        if self.tls is None:
            if self.token_file is not None:
                raise CredentialsError(
                    "--token-file needs --tls, so that nobody on the way can read it or pass for the service"
                )
            return
        files = self._folder(self.tls).read()
        if self.token_file is None:
            require_accepted(files, where=self.tls, as_server=False)
        else:
            live_secret(self.token_file)

    def _folder(self, tls: Path) -> TlsFolder:
        return TlsFolder(tls, has_certificate=self.token_file is None)

    def channel(self, target: str, options: Sequence[tuple[str, Any]]) -> grpc.aio.Channel:
        """A channel to an address, if the files are fit for use; connects when first used.

        Raises:
            UsageError: this process was forked from one that has made channels.
        """
        require_not_forked()
        if self.tls is None:
            return grpc.aio.insecure_channel(target, options=list(options))
        secret = None if self.token_file is None else live_secret(self.token_file)
        return RenewedChannel(
            live_files(self._folder(self.tls)),
            lambda files: grpc.aio.secure_channel(target, _composed(files, secret), options=list(options)),
        )

    def blocking_channels(
        self, target: str, options: Sequence[tuple[str, Any]]
    ) -> Callable[[], grpc.Channel]:
        """Gives the channel for the next call of a caller without an event loop; for any thread.

        It is another one once the files have changed; calls on the one before go on, and end it. Raises as
        `channel`.
        """
        require_not_forked()
        if self.tls is None:
            plain = grpc.insecure_channel(target, options=options)
            return lambda: plain
        secret = None if self.token_file is None else live_secret(self.token_file)
        files = live_files(self._folder(self.tls))

        def dial() -> grpc.Channel:
            return grpc.secure_channel(target, _composed(files.value, secret), options=options)

        channel = dial()

        def latest() -> grpc.Channel:
            nonlocal channel
            if files.refresh():
                channel = dial()
            return channel

        return latest

    async def require_let_in(self, host: str, port: int, server_name: str = "") -> None:
        """Asks a service that does not answer whether credentials are why; if so, an UnauthenticatedError."""
        reason = await why_not(
            host, port, tls=self.tls, has_certificate=self.token_file is None, server_name=server_name
        )
        if reason is not None:
            raise UnauthenticatedError(reason)


NO_CREDENTIALS: Final = Credentials()


class RenewedChannel(grpc.aio.Channel):
    """A channel whose next call is on a new one once the files have changed; calls that are open go on.

    Lives on one event loop.
    """

    def __init__(self, files: Live[TlsFiles], dial: Callable[[TlsFiles], grpc.aio.Channel]) -> None:
        self._files = files
        self._dial = dial
        self._line = _Line(dial(files.value))
        self._closing: set[asyncio.Task[None]] = set()

    def unary_unary(self, *args: Any, **kwargs: Any) -> Any:
        """See grpc.aio.Channel, as the next three."""
        return self._late("unary_unary", args, kwargs)

    def unary_stream(self, *args: Any, **kwargs: Any) -> Any:
        """See unary_unary."""
        return self._late("unary_stream", args, kwargs)

    def stream_unary(self, *args: Any, **kwargs: Any) -> Any:
        """See unary_unary."""
        return self._late("stream_unary", args, kwargs)

    def stream_stream(self, *args: Any, **kwargs: Any) -> Any:
        """See unary_unary."""
        return self._late("stream_stream", args, kwargs)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """See grpc.aio.Channel."""
        return self._line.channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """See grpc.aio.Channel."""
        await self._line.channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """See grpc.aio.Channel."""
        await self._line.channel.channel_ready()

    async def close(self, grace: float | None = None) -> None:
        """See grpc.aio.Channel; lines from before are closed too."""
        for task in self._closing:
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)
        await self._line.channel.close(grace)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _late(self, kind: str, args: Any, kwargs: Any) -> Callable[..., Call]:
        def call(*request: Any, **options: Any) -> Call:
            line = self._current()
            made = getattr(line.channel, kind)(*args, **kwargs)(*request, **options)
            line.opened()
            made.add_done_callback(lambda _: line.ended())
            return made

        return call

    def _current(self) -> "_Line":
        if self._files.refresh():
            before, self._line = self._line, _Line(self._dial(self._files.value))
            task = asyncio.ensure_future(before.close_when_idle())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        return self._line


class _Line:
    """One channel, and how many calls on it are open."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self._open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def opened(self) -> None:
        self._open += 1
        self._idle.clear()

    def ended(self) -> None:
        self._open -= 1
        if not self._open:
            self._idle.set()

    async def close_when_idle(self) -> None:
        """Closes it once no call is open, or when cancelled."""
        try:
            await self._idle.wait()
        finally:
            await self.channel.close()


class _Signing(grpc.AuthMetadataPlugin):
    """Signs each call when it is sent, so one that gRPC sends again is signed again."""

    def __init__(self, secret: Live[Secret]) -> None:
        self._secret = secret

    def __call__(self, context: grpc.AuthMetadataContext, callback: grpc.AuthMetadataPluginCallback) -> None:
        self._secret.refresh()
        service = context.service_url.rpartition("/")[2]
        token = sign(self._secret.value, f"/{service}/{context.method_name}", time_s=time.time())
        callback(((TOKEN_KEY, token),), None)


def _composed(files: TlsFiles, secret: Live[Secret] | None) -> grpc.ChannelCredentials:
    if secret is None:
        return grpc.ssl_channel_credentials(files.authority, files.key, files.certificate)
    return grpc.composite_channel_credentials(
        grpc.ssl_channel_credentials(files.authority), grpc.metadata_call_credentials(_Signing(secret))
    )
