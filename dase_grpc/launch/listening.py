"""When a node that was started listens, and where."""

import asyncio

from dase_grpc.launch.processes import Node
from dase_grpc.process.lifecycle import READY_PREFIX
from dase_grpc.replay.service.server import Address, parse_address


async def listening_address(node: Node, *, within_s: float) -> Address:
    """The address that a node prints once it answers; its stdout is a pipe.

    Raises:
        NodeFailedError: it ended or stayed silent instead.
    """
    if node.process.stdout is None:
        raise TypeError(f"the stdout of {node.name} is not a pipe")
    try:
        async with asyncio.timeout(within_s):
            line = (await node.process.stdout.readline()).decode(errors="replace").strip()
            if not line:
                await node.ended()
    except TimeoutError:
        raise node.failure(f"did not answer within {within_s:g} s") from None
    if not line.startswith(READY_PREFIX):
        raise node.failure(f"said {line!r} instead of its address" if line else "could not start")
    return parse_address(line.removeprefix(READY_PREFIX))
