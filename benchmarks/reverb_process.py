"""Reverb's side of against_reverb.py: a server, or a client that does rounds on command.

Runs in Reverb's own virtual environment (scripts/get_reverb.sh) and so imports nothing of this project.

python reverb_process.py server M N named|packed uniform|prioritised    prints the port once it listens
python reverb_process.py client M N named|packed PORT SERVER_PID

The client reads one command a line and answers each with a line of JSON: `insert METHOD SECONDS`,
`sample METHOD SECONDS`, `learn METHOD SECONDS`, `fill COUNT`, `empty`. What is learned from gets new
priorities. A transition is six named columns or, packed by its user, one vector. Methods are the fastest
found for Reverb: items of one step, many in flight, and batches made by tf.data, in one stream or in two that
are interleaved.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import numpy as np
import reverb
import tensorflow as tf

TABLE = "replay"
BATCH = 256
CAPACITY = 1_000_000
SAMPLES_IN_FLIGHT = 256
PREFETCHED_BATCHES = 8
KINDS_OF_STEPS = 1024
STEPS_A_LOOK = 64
STRUCTURED_IN_FLIGHT = 256
WRITER_IN_FLIGHT = 2000
FLUSH_EVERY = 32
PRIORITY_EXPONENT = 0.6
TICKS = os.sysconf("SC_CLK_TCK")


def column_sizes(m: int, n: int, form: str) -> dict[str, int]:
    """The columns of a transition."""
    named = {"observation": m, "action": n, "reward": 1, "next_observation": m, "done": 1, "agent_id": 1}
    return named if form == "named" else {"row": sum(named.values())}


def steps_of(sizes: dict[str, int]) -> list[dict[str, Any]]:
    """Transitions of Gaussian numbers."""
    rng = np.random.default_rng(0)
    return [
        {name: rng.standard_normal(size).astype(np.float32) for name, size in sizes.items()}
        for _ in range(KINDS_OF_STEPS)
    ]


def serve(sizes: dict[str, int], sampling: str) -> None:
    """Runs a server until it is killed: while it waits, it ignores SIGTERM."""
    selectors = {
        "uniform": reverb.selectors.Uniform,
        "prioritised": lambda: reverb.selectors.Prioritized(PRIORITY_EXPONENT),
    }
    table = reverb.Table(
        TABLE,
        sampler=selectors[sampling](),
        remover=reverb.selectors.Fifo(),
        max_size=CAPACITY,
        rate_limiter=reverb.rate_limiters.MinSize(1),
        signature={name: tf.TensorSpec((size,), tf.float32, name) for name, size in sizes.items()},
    )
    server = reverb.Server([table])
    print(server.port, flush=True)
    server.wait()


class Inserting:
    """Steps into the table, each an item of its own."""

    def __init__(self, client: Any, sizes: dict[str, int]) -> None:
        self._client = client
        self._names = list(sizes)
        self._steps = steps_of(sizes)

    def rounds(self, method: str, going_on: Callable[[int], bool]) -> int:
        """Inserts for as long as it is told to; returns how many are stored."""
        step, finish = {"structured": self._structured, "writer": self._writer}[method]()
        done = 0
        while going_on(done):
            for _ in range(STEPS_A_LOOK):
                step(done)
                done += 1
        finish()
        return done

    def _structured(self) -> tuple[Callable[[int], None], Callable[[], None]]:
        pattern = reverb.structured_writer.pattern_from_transform(
            step_structure=dict.fromkeys(self._names),
            transform=lambda step: {name: step[name][-1:] for name in self._names},
        )
        config = reverb.structured_writer.create_config(pattern=pattern, table=TABLE)
        writer = self._client.structured_writer([config])

        def step(index: int) -> None:
            writer.append(self._steps[index % KINDS_OF_STEPS])
            if index % FLUSH_EVERY == 0:
                writer.flush(block_until_num_items=STRUCTURED_IN_FLIGHT)

        return step, writer.flush

    def _writer(self) -> tuple[Callable[[int], None], Callable[[], None]]:
        writer = self._client.writer(
            max_sequence_length=1, chunk_length=1, max_in_flight_items=WRITER_IN_FLIGHT
        )

        def step(index: int) -> None:
            writer.append(self._steps[index % KINDS_OF_STEPS])
            writer.create_item(TABLE, 1, 1.0)

        def finish() -> None:
            writer.flush()
            writer.close()

        return step, finish


def batches(port: int, method: str) -> Iterator[Any]:
    """Batches as NumPy arrays, without end."""

    def dataset(_: Any = None) -> Any:
        return reverb.TimestepDataset.from_table_signature(
            f"localhost:{port}",
            TABLE,
            max_in_flight_samples_per_worker=SAMPLES_IN_FLIGHT,
            num_workers_per_iterator=1,
            get_signature_timeout_secs=30,
        ).batch(BATCH, drop_remainder=True)

    streams = {"one stream": 1, "two streams": 2}[method]
    found = (
        dataset()
        if streams == 1
        else tf.data.Dataset.range(streams).interleave(
            dataset, cycle_length=streams, num_parallel_calls=streams, deterministic=False
        )
    )
    yield from found.prefetch(PREFETCHED_BATCHES).as_numpy_iterator()


def cpu_s(pid: int) -> float:
    """Processor seconds of a process."""
    user, system = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / TICKS


class Client:
    """Does what it is told."""

    def __init__(self, sizes: dict[str, int], port: int, server: int) -> None:
        self._client = reverb.Client(f"localhost:{port}")
        self._client.server_info(timeout=60)
        self._inserting = Inserting(self._client, sizes)
        self._streams: dict[str, Iterator[Any]] = {}
        self._port = port
        self._server = server

    def do(self, command: str, *given: str) -> dict[str, float]:
        """One command; what was done in it."""
        method, amount = " ".join(given[:-1]), float(given[-1]) if given else 0.0
        if command == "empty":
            self._streams.clear()
            self._client.reset(TABLE)
            return {}
        if command == "fill":
            return self._timed(
                lambda until: self._inserting.rounds("writer", lambda done: done < amount), 0.0
            )
        if command == "insert":
            return self._timed(
                lambda until: self._inserting.rounds(method, lambda done: time.perf_counter() < until), amount
            )
        take = {"sample": self._sample, "learn": self._learn}[command]
        return self._timed(lambda until: take(method, until), amount)

    def _learn(self, method: str, until: float) -> int:
        """Takes batches, and gives each of their transitions a new priority."""
        stream = self._streams.setdefault(method, batches(self._port, method))
        errors = np.random.default_rng(0).exponential(size=BATCH).tolist()
        done = 0
        while time.perf_counter() < until:
            keys = next(stream).info.key.tolist()
            self._client.mutate_priorities(TABLE, updates=dict(zip(keys, errors, strict=True)))
            done += 1
        return done

    def _sample(self, method: str, until: float) -> int:
        stream = self._streams.setdefault(method, batches(self._port, method))
        done = 0
        while time.perf_counter() < until:
            next(stream)
            done += 1
        return done

    def _timed(self, work: Callable[[float], int], seconds: float) -> dict[str, float]:
        pids, started = (os.getpid(), self._server), time.perf_counter()
        before = [cpu_s(pid) for pid in pids]
        events = work(started + seconds)
        took = time.perf_counter() - started
        client_s, server_s = (cpu_s(pid) - was for pid, was in zip(pids, before, strict=True))
        return {"events": events, "seconds": took, "client_s": client_s, "server_s": server_s}


def main() -> None:
    """Is a server or a client."""
    role, m, n, form, *where = sys.argv[1:]
    sizes = column_sizes(int(m), int(n), form)
    if role == "server":
        serve(sizes, *where)
        return
    client = Client(sizes, *map(int, where))
    print("{}", flush=True)
    for line in sys.stdin:
        print(json.dumps(client.do(*line.split())), flush=True)


if __name__ == "__main__":
    main()
