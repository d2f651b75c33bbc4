"""A TCP proxy between a node and a service that breaks their connection in all the ways a network does."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from dase_grpc.replay.wire.addresses import Address

PIECE = 65_536


class Proxy:
    """Forwards connections to `target`, as long as it is told to.

    cut: connections are reset, new ones too. hang: bytes vanish both ways, and connections stay open, new
    ones too. `delay_s` keeps each piece back. `heal` lets new connections through; those that lost bytes
    stay dead, as after a real partition that outlived its retransmissions.
    """

    def __init__(self, target: Address) -> None:
        self._target = target
        self._mode = "open"
        self._hung: set[asyncio.StreamWriter] = set()
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = asyncio.Event()
        self.delay_s = 0.0
        self.connections = 0

    def cut(self) -> None:
        """Resets every connection, and each new one."""
        self._mode = "cut"
        for writer in tuple(self._open):
            writer.transport.abort()

    def hang(self) -> None:
        """Lets every byte vanish."""
        self._mode = "hang"
        self._hung |= self._open

    def heal(self) -> None:
        """Lets new connections through."""
        self._mode = "open"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of a client."""
        self.connections += 1
        if self._mode == "cut":
            writer.transport.abort()
            return
        self._open.add(writer)
        if self._mode == "hang":
            self._hung.add(writer)
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        far: asyncio.StreamWriter | None = None
        try:
            far_reader, far = await asyncio.open_connection(self._target.host, self._target.port)
            self._open.add(far)
            if writer in self._hung:
                self._hung.add(far)
            await asyncio.gather(
                self._pump(reader, far, near=writer), self._pump(far_reader, writer, near=writer)
            )
        except OSError:
            pass  # one side has gone, and so goes the other
        finally:
            for each in (writer, far):
                if each is not None:
                    self._open.discard(each)
                    self._hung.discard(each)
                    each.transport.abort()
            self._tasks.discard(task)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, near: asyncio.StreamWriter
    ) -> None:
        while piece := await reader.read(PIECE):
            if self.delay_s:
                await asyncio.sleep(self.delay_s)
            if near not in self._hung:
                writer.write(piece)
                await writer.drain()
        if near in self._hung:
            await self._closing.wait()  # the end of a connection does not get through either
        raise ConnectionResetError

    async def close(self) -> None:
        """Ends every connection."""
        self._mode = "cut"
        self._closing.set()
        for writer in tuple(self._open):
            writer.transport.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def proxied(target: Address) -> AsyncIterator[tuple[Proxy, Address]]:
    """A proxy to a service, and its address."""
    proxy = Proxy(target)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    try:
        yield proxy, Address("127.0.0.1", server.sockets[0].getsockname()[1])
    finally:
        server.close()
        await proxy.close()
