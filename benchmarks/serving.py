"""Measures `dase serve`: requests a second and how long each takes, with 1, 8 and 64 clients.

    python benchmarks/serving.py [--quick] [--turns 3] [--seconds 2] [--results FILE.csv | --show FILE.csv]

A client asks for the action of one observation, and for the next one once it has it: by a call each (Act),
or over one stream (ActStream). The policy is that of an agent on HalfCheetah-v5 with two layers of 256,
served from its run and from an ONNX file, and called in this process. All clients are tasks of one process
beside the server's, on one connection; PolicyClient is a blocking one.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from measuring import Figure, answer, conditions, cpu_s, machine, markdown, median, ratios, values

import dase_grpc as dase
from dase_grpc.inference.v1.inference_pb2 import ActRequest
from dase_grpc.inference.v1.inference_pb2_grpc import InferenceServiceStub
from dase_grpc.inference.wire import write_observations
from dase_grpc.launch.export import export_policy
from dase_grpc.launch.serve import ServedPolicy, served_policy
from dase_grpc.process.lifecycle import READY_PREFIX
from dase_grpc.replay.client.cluster import open_channel
from dase_grpc.replay.wire.addresses import parse_address
from dase_grpc.schema import Array

CLIENTS: Final = (1, 8, 64)
WARM_UP_S: Final = 0.1
WHATS: Final = ("requests/s", "p50", "p99")
IN_PROCESS: Final = "in process"
SMALL: Final[Mapping[str, Any]] = {
    "steps": 50,
    "agents": 1,
    "agent.start_steps": 50,
    "eval.every": 50,
    "eval.episodes": 1,
    "eval.max_episode_steps": 10,
}
"""What the policy has learned does not matter."""


@dataclass(frozen=True)
class Load:
    """What was asked in a round: how long each request took, in seconds, and all of them together."""

    took_s: Sequence[float]
    seconds: float
    server_s: float = 0.0


@dataclass(frozen=True)
class Server:
    """A running `dase serve`."""

    address: str
    pid: int


@contextmanager
def serving(target: Path, *more: str) -> Iterator[Server]:
    """A policy server as a process of its own; ends with the block."""
    agent = [] if target.suffix else ["--agent=0"]
    command = [sys.executable, "-m", "dase_grpc", "serve", str(target), "--listen=127.0.0.1:0", *agent, *more]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        line = process.stdout.readline() if process.stdout else ""
        if not line.startswith(READY_PREFIX):
            raise SystemExit(f"the policy server did not come up: {line!r}")
        yield Server(line.removeprefix(READY_PREFIX).strip(), process.pid)
    finally:
        process.terminate()
        process.communicate(timeout=60)


def repeated(act: Callable[[], Any], seconds: float) -> Load:
    """One client that calls."""
    took: list[float] = []
    began = before = time.perf_counter()
    while before - began < seconds:
        act()
        now = time.perf_counter()
        took.append(now - before)
        before = now
    return Load(took, before - began)


Ask = Callable[[], Coroutine[Any, Any, object]]


@contextmanager
def asking(stub: Any, request: ActRequest, *, streams: bool) -> Iterator[Ask]:
    """How one client asks."""
    if not streams:
        yield lambda: stub.Act(request)
        return
    call = stub.ActStream()

    async def ask() -> object:
        await call.write(request)
        return await call.read()

    yield ask
    call.cancel()


async def asked(server: Server, request: ActRequest, clients: int, seconds: float, *, streams: bool) -> Load:
    """Clients over gRPC."""
    took: list[float] = []

    async def client(ask: Ask, until: float) -> None:
        while (before := time.perf_counter()) < until:
            await ask()
            took.append(time.perf_counter() - before)

    async with AsyncExitStack() as stack:
        channel = await stack.enter_async_context(open_channel(parse_address(server.address)))
        stub = InferenceServiceStub(channel)
        asks = [stack.enter_context(asking(stub, request, streams=streams)) for _ in range(clients)]
        await asyncio.gather(*(client(ask, time.perf_counter() + WARM_UP_S) for ask in asks))
        took.clear()
        began, cpu = time.perf_counter(), cpu_s(server.pid)
        await asyncio.gather(*(client(ask, began + seconds) for ask in asks))
        return Load(took, time.perf_counter() - began, cpu_s(server.pid) - cpu)


def figures(load: Load, subject: str, who: str, turn: int, busy: float) -> Iterator[Figure]:
    """What is kept of a round."""
    count = len(load.took_s)
    p50, p99 = 1e6 * np.quantile(load.took_s, [0.5, 0.99])
    for what, value in zip(WHATS, (count / load.seconds, float(p50), float(p99)), strict=True):
        yield Figure(machine(), busy, subject, what, who, turn, value, server_us=1e6 * load.server_s / count)


def measure(given: argparse.Namespace) -> list[Figure]:
    """All rounds; what is compared takes turns."""
    turns, seconds = (1, 0.2) if given.quick else (given.turns, given.seconds)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack, asyncio.Runner() as runner:
        run = dase.train("HalfCheetah-v5", mode="lockstep", runs=folder, name="run", verbose=False, **SMALL)
        file = export_policy(run.path, Path(folder) / "policy.onnx", agent=0)
        policies = {"run": served_policy(run.path, "0"), "ONNX": served_policy(file)}
        size = policies["run"].description.observation_size
        row = np.random.default_rng(0).standard_normal((1, size)).astype(np.float32)
        request = write_observations(row)
        servers = {"run": stack.enter_context(serving(run.path)), "ONNX": stack.enter_context(serving(file))}
        for delay in given.delays:
            who = f"run, {delay:g} ms delay"
            servers[who] = stack.enter_context(serving(run.path, f"--max-delay-ms={delay}"))
        client = stack.enter_context(dase.PolicyClient(servers["run"].address))
        rounds = [*_bare(policies, row), *_served(runner, servers, request)]
        act = stack.enter_context(client.stream())
        rounds.append(("1 client", "run, PolicyClient", lambda s: repeated(lambda: client.act(row[0]), s)))
        rounds.append(("1 client", "run, PolicyClient's stream", lambda s: repeated(lambda: act(row[0]), s)))
        return list(_turns(rounds, turns, seconds))


Play = tuple[str, str, Callable[[float], Load]]


def _bare(policies: Mapping[str, ServedPolicy], row: Array) -> Iterator[Play]:
    def play(policy: ServedPolicy) -> Callable[[float], Load]:
        return lambda seconds: repeated(lambda: policy.act(row), seconds)

    for who, policy in policies.items():
        yield IN_PROCESS, who, play(policy)


def _served(runner: asyncio.Runner, servers: Mapping[str, Server], request: ActRequest) -> Iterator[Play]:
    def play(server: Server, clients: int, *, streams: bool) -> Callable[[float], Load]:
        return lambda seconds: runner.run(asked(server, request, clients, seconds, streams=streams))

    for clients in CLIENTS:
        subject = f"{clients} client{'s' if clients > 1 else ''}"
        for who, server in servers.items():
            yield subject, who, play(server, clients, streams=False)
            if "," not in who:
                yield subject, f"{who}, streams", play(server, clients, streams=True)


def _turns(rounds: Sequence[Play], turns: int, seconds: float) -> Iterator[Figure]:
    for turn in range(turns):
        first = turn % len(rounds)
        for subject, who, play in (*rounds[first:], *rounds[:first]):
            busy = os.getloadavg()[0]
            yield from figures(play(seconds), subject, who, turn, busy)


def tables(found: Sequence[Figure]) -> str:
    """One row for each round, beside the policy in this process."""
    rows = []
    for subject, who in dict.fromkeys((figure.subject, figure.who) for figure in found):
        rate, p50, p99 = (values(found, subject=subject, who=who, what=what) for what in WHATS)
        bare = values(found, subject=IN_PROCESS, who=who.partition(",")[0], what="p50")
        beside = "" if subject == IN_PROCESS else f"{np.median(ratios(p50, bare)):.1f}"
        cpu = "" if subject == IN_PROCESS or "PolicyClient" in who else f"{median(rate, 'server_us'):.0f}"
        numbers = [f"{median(rate):,.0f}", f"{median(p50):,.0f}", f"{median(p99):,.0f}", beside, cpu]
        rows.append([subject, who, *numbers])
    head = ["clients", "policy", "requests/s", "p50 µs", "p99 µs", "p50 over in process", "server CPU µs"]
    return f"{conditions(found)}\n\n{markdown(head, rows)}"


def main() -> None:
    """Measures, or shows what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short turn, to see that it works")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each round")
    parser.add_argument("--delays", type=float, nargs="*", default=[1.0], metavar="MS", help="--max-delay-ms")
    answer(parser, measure, tables)


if __name__ == "__main__":
    main()
