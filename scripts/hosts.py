"""Hosts on one machine: a network namespace each, and a hub between them that delays, loses and cuts off.

python scripts/hosts.py replay learner-0 learner-1 [--delay-ms 25] [--loss 0.01]

Makes them, says each one's address and how to run something there, and takes commands on its standard input
until that ends: `delay SECONDS`, `loss PROBABILITY`, `cut HOST`, `heal HOST`, `count`. Each is answered by a
line. Every packet between two hosts comes that late, each way; a host that is cut off neither sends nor
receives. The machine itself is a host too, `here`, at the first address.

Each namespace has a TUN device, whose other end this process reads and writes, so neither netem nor iptables
nor a bridge is needed, but root and /dev/net/tun are.
"""

import argparse
import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
CLONE_NEWNET = 0x40000000
PACKET_BYTES = 65_536
PACKETS_AT_ONCE = 64
QUEUE = "2000"
HERE = "here"


class NoNamespaces(Exception):
    """This machine does not allow it; says why."""


class Hub:
    """Carries packets between TUN devices, by their destination; its attributes may change at any time.

    Attributes:
        delay_s: how late each packet comes.
        loss: probability that one is lost.
        cut: addresses that neither send nor receive.
        carried, lost: packets so far; those of a host that is cut off are lost.
    """

    def __init__(self, devices: Mapping[bytes, int], *, seed: int) -> None:
        self.delay_s = self.loss = 0.0
        self.cut: frozenset[bytes] = frozenset()
        self.carried = self.lost = 0
        self._devices = dict(devices)
        self._rng = random.Random(seed)
        self._due: list[tuple[float, int, int, bytes]] = []
        self._number = 0

    def run(self, until: int) -> None:
        """Carries packets until something can be read from this descriptor."""
        poll = select.poll()
        for descriptor in (until, *self._devices.values()):
            poll.register(descriptor, select.POLLIN)
        while True:
            pause_ms = max(0.0, self._due[0][0] - time.monotonic()) * 1e3 if self._due else None
            ready = {descriptor for descriptor, _ in poll.poll(pause_ms)}
            if until in ready:
                return
            for descriptor in ready:
                self._take(descriptor)
            self._give()

    def _take(self, descriptor: int) -> None:
        due = time.monotonic() + self.delay_s
        for _ in range(PACKETS_AT_ONCE):
            try:
                packet = os.read(descriptor, PACKET_BYTES)
            except BlockingIOError:
                return
            source, destination = packet[12:16], packet[16:20]
            target = self._devices.get(destination) if packet[0] >> 4 == 4 else None
            if target is None:
                continue
            if source in self.cut or destination in self.cut or self._rng.random() < self.loss:
                self.lost += 1
                continue
            self._number += 1
            heapq.heappush(self._due, (due, self._number, target, packet))

    def _give(self) -> None:
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            _, _, target, packet = heapq.heappop(self._due)
            self.carried += 1
            with suppress(OSError):  # its queue is full, or the device is down: a loss like any other
                os.write(target, packet)


@dataclass
class Hosts:
    """Hosts that are there, seen from the process that has started their hub."""

    addresses: Mapping[str, str]
    _prefix: str
    _hub: "subprocess.Popen[str]" = field(repr=False)

    def within(self, name: str) -> tuple[str, ...]:
        """What a command is put behind to run on a host."""
        return () if name == HERE else ("ip", "netns", "exec", f"{self._prefix}-{name}")

    def tell(self, command: str) -> str:
        """Gives the hub a command; its answer."""
        assert self._hub.stdin is not None
        assert self._hub.stdout is not None
        self._hub.stdin.write(f"{command}\n")
        self._hub.stdin.flush()
        answer = self._hub.stdout.readline().strip()
        if not answer or answer.startswith("error"):
            raise ValueError(f"{command!r}: {answer or 'the hub has ended'}")
        return answer


@contextmanager
def hosts(*names: str, delay_s: float = 0.0, loss: float = 0.0) -> Iterator[Hosts]:
    """Starts a process with the hub between these hosts; all is gone after the block.

    Raises:
        NoNamespaces: this machine does not allow it.
    """
    command = [sys.executable, __file__, *names, f"--delay-ms={delay_s * 1e3}", f"--loss={loss}"]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        addresses: dict[str, str] = {}
        prefix = ""
        while not (line := process.stdout.readline().strip()).startswith("ready"):
            if not line:
                raise NoNamespaces(process.communicate()[1].strip().removeprefix("error: "))
            name, addresses[name] = line.split()[:2]
        prefix = line.split()[1]
        yield Hosts(addresses, prefix, process)
    finally:
        with suppress(BrokenPipeError):
            process.communicate(timeout=30)


@contextmanager
def _made(prefix: str, names: Sequence[str]) -> Iterator[dict[str, tuple[str, int]]]:
    """Namespaces with a device each; yields the address and the device's descriptor of each host."""
    network = f"10.{64 + os.getpid() % 64}.{os.getpid() // 64 % 256}"
    made: dict[str, tuple[str, int]] = {}
    with ExitStack() as stack:
        for number, name in enumerate((HERE, *names), 1):
            namespace = None if name == HERE else f"{prefix}-{name}"
            if namespace is not None:
                _ip("netns", "add", namespace)
                stack.callback(_ip, "netns", "del", namespace)
                _ip("-n", namespace, "link", "set", "lo", "up")
            device = f"{prefix[:12]}{number}"
            descriptor = tun_in(namespace, device)
            stack.callback(os.close, descriptor)
            inside = () if namespace is None else ("-n", namespace)
            address = f"{network}.{number}"
            _ip(*inside, "addr", "add", f"{address}/24", "dev", device)
            _ip(*inside, "link", "set", device, "txqueuelen", QUEUE, "up")
            made[name] = (address, descriptor)
        yield made


def _ip(*arguments: str) -> None:
    try:
        subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError) as error:
        said = str(getattr(error, "stderr", "") or error).strip()
        raise NoNamespaces(f"`ip {' '.join(arguments)}` failed: {said}") from None


def _tun(device: str) -> int:
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TUN | IFF_NO_PI))
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def tun_in(namespace: str | None, device: str) -> int:
    """A TUN device in a namespace, None being this one; reads and writes of its descriptor do not block.

    A thread of its own goes there, since it never comes back.

    Raises:
        NoNamespaces: this machine does not allow it.
    """
    found: list[int | OSError] = []

    def make() -> None:
        try:
            if namespace is not None:
                libc = ctypes.CDLL(None, use_errno=True)
                with Path(f"/run/netns/{namespace}").open("rb") as file:
                    if libc.setns(file.fileno(), CLONE_NEWNET):
                        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            found.append(_tun(device))
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    (made,) = found
    if isinstance(made, OSError):
        raise NoNamespaces(f"no TUN device can be made: {made.strerror}")
    return made


def _obey(hub: Hub, addresses: Mapping[str, bytes], command: str) -> str:
    """Does what a command says; the answer."""
    verb, *words = command.split() or [""]
    try:
        if verb == "delay":
            hub.delay_s = float(*words)
        elif verb == "loss":
            hub.loss = float(*words)
        elif verb == "cut":
            hub.cut |= {addresses[words[0]]}
        elif verb == "heal":
            hub.cut -= {addresses[words[0]]}
        elif verb == "count":
            return f"carried {hub.carried} lost {hub.lost}"
        else:
            return f"error: {verb!r} is none of delay, loss, cut, heal, count"
    except (KeyError, IndexError, TypeError, ValueError) as error:
        return f"error: {command}: {error!r}"
    return "ok"


def main() -> int:
    """Makes hosts and a hub, and obeys until its standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="+", help="of the hosts")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="how late each packet comes")
    parser.add_argument("--loss", type=float, default=0.0, help="probability that a packet is lost")
    parser.add_argument("--seed", type=int, default=0, help="of the losses")
    options = parser.parse_args()
    prefix = f"dh{os.getpid()}"
    try:
        with _made(prefix, options.names) as made:
            addresses = {name: bytes(map(int, address.split("."))) for name, (address, _) in made.items()}
            devices = {addresses[name]: descriptor for name, (_, descriptor) in made.items()}
            hub = Hub(devices, seed=options.seed)
            hub.delay_s, hub.loss = options.delay_ms / 1e3, options.loss
            woken, wake = os.pipe()
            carrying = threading.Thread(target=hub.run, args=(woken,))
            carrying.start()
            try:
                for name, (address, _) in made.items():
                    within = "" if name == HERE else f" ip netns exec {prefix}-{name}"
                    print(f"{name} {address}{within}")
                print(f"ready {prefix}", flush=True)
                with suppress(KeyboardInterrupt):
                    for line in sys.stdin:
                        print(_obey(hub, addresses, line), flush=True)
            finally:
                os.write(wake, b"x")
                carrying.join()
    except NoNamespaces as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
