"""TLS connections that came to nothing: gRPC tells of each that begins, and of none that fails."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

FAILED_AFTER_S: Final = 11.0
"""A connection without a call for so long has failed: a handshake may take 10 s."""

FORGOTTEN_AFTER_S: Final = 65.0
"""An address without a call for so long may be another connection's: idle ones are closed after 60 s."""

MAX_PENDING: Final = 65_536


@dataclass
class _Peer:
    open_calls: int
    last_call_at: float


class Handshakes:
    """Counts the connections that never brought a call. Lives on one event loop, but for `begun`.

    Which connection failed cannot be told, only how many did: those that began without those that brought
    a call, each of which is known by its client's address.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pending: deque[float] = deque(maxlen=MAX_PENDING)
        self._peers: dict[str, _Peer] = {}

    def begun(self) -> None:
        """Notes that a connection begins; from any thread."""
        self._pending.append(self._clock())

    @contextmanager
    def call(self, peer: str) -> Iterator[None]:
        """Notes a call for as long as it is open."""
        known = self._peers.get(peer)
        if known is None:
            known = self._peers[peer] = _Peer(0, self._clock())
            if self._pending:
                self._pending.popleft()
        known.open_calls += 1
        try:
            yield
        finally:
            known.open_calls -= 1
            known.last_call_at = self._clock()

    def failed(self) -> int:
        """How many have turned out to have failed since this was called last."""
        now, count = self._clock(), 0
        while self._pending and now - self._pending[0] > FAILED_AFTER_S:
            self._pending.popleft()
            count += 1
        gone = [
            peer
            for peer, known in self._peers.items()
            if not known.open_calls and now - known.last_call_at > FORGOTTEN_AFTER_S
        ]
        for peer in gone:
            del self._peers[peer]
        return count
