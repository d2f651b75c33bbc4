"""A second host on this machine: a network namespace behind a link that delays, loses and stops packets.

The link is two TUN devices, one here and one there, and a thread that carries packets between them, so it
needs neither netem nor iptables, but root and /dev/net/tun.
"""

import heapq
import os
import random
import select
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from hosts import PACKET_BYTES, NoNamespaces, tun_in
from patience import PATIENCE_S


class LossyLink:
    """Carries packets between two TUN devices; its attributes may be changed at any time.

    Attributes:
        loss: probability that a packet is lost, each way.
        delay_s, jitter_s: each packet comes this late, plus up to the jitter; packets may overtake.
        down: nothing gets through.
        lost: packets that were lost so far, and `carried` those that were not.
    """

    def __init__(self, near: int, far: int, *, seed: int) -> None:
        self.loss, self.delay_s, self.jitter_s, self.down = 0.0, 0.0, 0.0, False
        self.lost = self.carried = 0
        self._ends = {near: far, far: near}
        self._rng = random.Random(seed)
        self._due: list[tuple[float, int, int, bytes]] = []
        self._woken, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._carry, name="lossy link")

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        os.close(self._wake)
        self._thread.join()
        for descriptor in (self._woken, *self._ends):
            os.close(descriptor)

    def _carry(self) -> None:
        number = 0
        while True:
            pause_s = max(0.0, self._due[0][0] - time.monotonic()) if self._due else None
            ready, _, _ = select.select([self._woken, *self._ends], [], [], pause_s)
            if self._woken in ready:
                return
            for end in ready:
                packet, number = os.read(end, PACKET_BYTES), number + 1
                if self.down or self._rng.random() < self.loss:
                    self.lost += 1
                    continue
                due = time.monotonic() + self.delay_s + self._rng.uniform(0.0, self.jitter_s)
                heapq.heappush(self._due, (due, number, self._ends[end], packet))
            while self._due and self._due[0][0] <= time.monotonic():
                _, _, end, packet = heapq.heappop(self._due)
                self.carried += 1
                os.write(end, packet)


@contextmanager
def second_host(*, seed: int = 0) -> Iterator[tuple[str, str, LossyLink]]:
    """Makes the namespace and the link; yields its name for `ip netns exec`, this end's address, the link.

    Raises:
        NoNamespaces: this machine does not allow it.
    """
    name = f"dase-{os.getpid()}"
    here, there = (f"10.77.{os.getpid() % 250 + 1}.{host}" for host in (1, 2))
    try:
        _ip("netns", "add", name)
    except (OSError, subprocess.SubprocessError) as error:
        raise NoNamespaces(f"no network namespace can be made: {_said(error)}") from None
    near = far = -1
    try:
        near = tun_in(None, f"dase{os.getpid() % 10**6}")
        far = tun_in(name, "far")
        for descriptor in (near, far):
            os.set_blocking(descriptor, True)
        _ip("addr", "add", here, "peer", there, "dev", f"dase{os.getpid() % 10**6}")
        _ip("link", "set", f"dase{os.getpid() % 10**6}", "up")
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "addr", "add", there, "peer", here, "dev", "far")
        _ip("-n", name, "link", "set", "far", "up")
        link = LossyLink(near, far, seed=seed)
        near = far = -1
        link.start()
        try:
            yield name, here, link
        finally:
            link.close()
    finally:
        for descriptor in (near, far):
            if descriptor >= 0:
                os.close(descriptor)
        _ip("netns", "del", name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=PATIENCE_S)


def _said(error: Exception) -> str:
    return str(getattr(error, "stderr", "") or error).strip()
