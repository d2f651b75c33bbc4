"""Children of a process that has gRPC at work: each becomes the program it was started for."""

import os
import subprocess
import sys

from patience import PATIENCE_S

PROGRAM = """
import asyncio, subprocess
from dase_grpc.replay.service.server import bind, make_server
from dase_grpc.replay.client.cluster import open_channel
from dase_grpc.replay.wire.addresses import parse_address

async def main():
    server = make_server()
    address = bind(server, parse_address("127.0.0.1:0"))
    await server.start()
    async with open_channel(address) as channel:
        await channel.channel_ready()
        for _ in range(5):
            # With a preexec_fn Python forks instead of spawning, as multiprocessing and FFmpeg's wrapper do.
            subprocess.run(["true"], preexec_fn=lambda: None, check=True)
    await server.stop(None)

asyncio.run(main())
"""


def test_grpc_does_nothing_in_forked_children():
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
