"""Why a service does not answer, as the operating system sees it: gRPC keeps that back."""

import asyncio
from typing import Final

from dase_grpc.replay.service.server import Address

PROBE_S: Final = 1.0


async def silence_of(address: Address, *, within_s: float = PROBE_S) -> str:
    """What keeps a service from answering, in a few words; "" where a connection can be made.

    Takes `within_s` at most. Neither a name that does not resolve yet nor a closed port is an error here: a
    service may be about to start.
    """
    loop = asyncio.get_running_loop()
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(within_s):
            try:
                await loop.getaddrinfo(address.host, address.port)
            except OSError as error:
                return f"the name {address.host} does not resolve ({error.strerror or error})"
            _, writer = await asyncio.open_connection(address.host, address.port)
    except ConnectionRefusedError:
        return "nothing listens there"
    except TimeoutError:
        return f"no connection within {within_s:g} s"
    except OSError as error:
        return f"no connection ({error.strerror or error})"
    finally:
        if writer is not None:
            writer.close()
    return ""
