"""How many updates a second a learner makes whose replay is far away, beside one on the replay's own host.

python benchmarks/distance.py [--prefetch 1,2,4,8] [--delay-ms 25] [--loss 0.01] [--congestion reno,bbr]

Two learners of HalfCheetah-v5 with the paper's networks and batch (45 kB) on one replay, in network
namespaces (scripts/hosts.py): one reaches it over loopback, the other over a hub that holds every packet,
each way, for the delay, and loses some. Only one of them runs at a time, in turns of --seconds, so that a
busy machine slows both alike; the other is stopped. Printed are updates a second, the median over rounds,
and in brackets the share of the learner on loopback in the same rounds. --congestion, several as reno,bbr,
is what the replay's host sends by. Needs root.
"""

import argparse
import importlib.util
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from rich.console import Console
from rich.table import Table

PORT, METRICS = 50_051, 9_500
WARM_S: Final = 1.0
READY_S: Final = 90.0
CONGESTION: Final = "/proc/sys/net/ipv4/tcp_congestion_control"
UPDATES: Final = "dase_learner_updates_total"
SETTINGS: Final = {
    "agent.start_steps": 512,
    "replay.min_size": 256,
    "replay.capacity": 100_000,
    "eval.every": 10_000_000,
    "train.checkpoint_every": 10_000_000,
    "train.steps": 10_000_000,
}


@dataclass(frozen=True)
class Learner:
    """A learner process and where it serves its metrics; `host` is the replay's for the one on loopback."""

    process: "subprocess.Popen[bytes]"
    metrics: str

    def updates(self) -> float:
        """Updates so far; 0 while it has not begun."""
        try:
            with urllib.request.urlopen(self.metrics, timeout=5) as answer:
                text = answer.read().decode()
        except OSError:
            return 0.0
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(UPDATES))

    def until(self, updates: float) -> None:
        """Waits until it has made so many."""
        deadline = time.monotonic() + READY_S
        while self.updates() < updates:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the learner at {self.metrics} does not train")
            time.sleep(0.2)

    def rate(self, seconds: float) -> float:
        """Updates a second while it alone runs; it is stopped before and after."""
        self.process.send_signal(signal.SIGCONT)
        time.sleep(WARM_S)
        before, began = self.updates(), time.perf_counter()
        time.sleep(seconds)
        rate = (self.updates() - before) / (time.perf_counter() - began)
        self.process.send_signal(signal.SIGSTOP)
        return rate


def load_hosts() -> ModuleType:
    """scripts/hosts.py as a module."""
    path = Path(__file__).parents[1] / "scripts" / "hosts.py"
    spec = importlib.util.spec_from_file_location("hosts", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is missing")
    module = importlib.util.module_from_spec(spec)
    sys.modules["hosts"] = module
    spec.loader.exec_module(module)
    return module


@contextmanager
def node(made: Any, host: str, *arguments: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A node on a host; killed with the block. It is the process itself, so that it can be stopped."""
    command = [*made.within(host), sys.executable, "-m", "dase_grpc", "node", "--insecure", *arguments]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def learners(made: Any, folder: Path, prefetch: int) -> Iterator[tuple[Learner, Learner]]:
    """A learner on the replay's host and one on another, both stopped once they have begun to update."""
    settings = [f"--set={key}={value}" for key, value in SETTINGS.items()]
    with ExitStack() as stack:
        replay = made.addresses["replay"]
        buffer = ("--capacity=100000", "--min-size=256")
        server = stack.enter_context(
            node(made, "replay", "--role=replay", f"--listen=0.0.0.0:{PORT}", *buffer)
        )
        if server.stdout is None or b"listening" not in server.stdout.readline():
            raise SystemExit("the replay did not start")
        both = []
        for agent, (host, address) in enumerate((("replay", "127.0.0.1"), ("learner", replay))):
            flags = (
                f"--agent={agent}",
                "--agents=2",
                "--env=HalfCheetah-v5",
                f"--set=replay.prefetch={prefetch}",
            )
            where = (f"--replay={address}:{PORT}", f"--run-dir={folder / f'{prefetch}-{agent}'}")
            metrics = (f"--metrics-host={made.addresses[host]}", f"--metrics-port={METRICS + agent}")
            process = stack.enter_context(
                node(made, host, "--role=learner", *flags, *where, *metrics, *settings)
            )
            both.append(Learner(process, f"http://{made.addresses[host]}:{METRICS + agent}/metrics"))
        for each in both:
            each.until(50)
            each.process.send_signal(signal.SIGSTOP)
        yield both[0], both[1]


def measure(
    made: Any,
    folder: Path,
    prefetch: int,
    conditions: Sequence[tuple[float, float]],
    options: argparse.Namespace,
) -> tuple[list[float], list[list[float]]]:
    """Rates on loopback by rounds, and those under each condition (delay in seconds, loss)."""
    near_rates: list[float] = []
    far_rates: list[list[float]] = [[] for _ in conditions]
    with learners(made, folder, prefetch) as (near, far):
        for _ in range(options.rounds):
            near_rates.append(near.rate(options.seconds))
            for rates, (delay_s, loss) in zip(far_rates, conditions, strict=True):
                made.tell(f"delay {delay_s}")
                made.tell(f"loss {loss}")
                rates.append(far.rate(options.seconds))
            made.tell("delay 0")
            made.tell("loss 0")
    return near_rates, far_rates


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--prefetch", default="1,2,4,8,16,32", help="settings of replay.prefetch")
    parser.add_argument("--delay-ms", type=float, default=25.0, help="of each packet, each way")
    parser.add_argument("--loss", type=float, default=0.01, help="probability that a packet is lost")
    parser.add_argument("--congestion", default="", help="what the replay's host sends by; several: reno,bbr")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a turn")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each")
    options = parser.parse_args()
    hosts, delay_s = load_hosts(), options.delay_ms / 1e3
    conditions = [(0.0, 0.0), (delay_s, 0.0), (delay_s, options.loss)]
    names = ["0 ms", f"{options.delay_ms:g} ms", f"{options.delay_ms:g} ms, {options.loss:.0%} lost"]
    table = Table("sent by", "prefetch", "loopback", *(f"hub, {name}" for name in names), box=None)
    with tempfile.TemporaryDirectory() as folder, hosts.hosts("replay", "learner") as made:
        for congestion in options.congestion.split(","):
            setting = f"echo {congestion} > {CONGESTION}" if congestion else "true"
            subprocess.run([*made.within("replay"), "sh", "-c", setting], check=True)
            for prefetch in map(int, options.prefetch.split(",")):
                near, far = measure(made, Path(folder) / congestion, prefetch, conditions, options)
                shares = [
                    statistics.median(rate / base for rate, base in zip(rates, near, strict=True))
                    for rates in far
                ]
                cells = [
                    f"{statistics.median(rates):.0f} ({share:.0%})"
                    for rates, share in zip(far, shares, strict=True)
                ]
                table.add_row(
                    congestion or Path(CONGESTION).read_text().strip(),
                    str(prefetch),
                    f"{statistics.median(near):.0f}",
                    *cells,
                )
    console = Console(width=140)
    console.print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {options.rounds} rounds of turns")
    console.print(table)


if __name__ == "__main__":
    main()
