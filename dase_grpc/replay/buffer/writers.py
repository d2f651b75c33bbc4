"""Writers without a stream, and since when, so that those that are gone can be forgotten."""

import math
from collections.abc import Iterable
from typing import Final

WriterKey = tuple[int, str]
"""Agent id and name."""

GONE_AFTER_S: Final = 900.0
"""How long a writer without a stream is kept; a client gives up after 600 s as a rule (--replay-timeout)."""


class WriterWatch:
    """Which writers have streams; `now` is a monotonic clock's reading in seconds.

    Rows come over streams that the service has answered, so those of a writer without one cannot arrive
    until it opens another.

    Attributes:
        began: writers that nothing is known of have had no stream since then.
    """

    def __init__(self, *, began: float = 0.0) -> None:
        self.began = began
        self._streams: dict[WriterKey, int] = {}
        self._ended: dict[WriterKey, float] = {}
        self._left: set[WriterKey] = set()

    def opened(self, writer: WriterKey) -> None:
        """Notes that a stream of a writer begins."""
        self._streams[writer] = self._streams.get(writer, 0) + 1

    def closed(self, writer: WriterKey, now: float) -> None:
        """Notes that a stream has ended."""
        left = self._streams.pop(writer) - 1
        if left:
            self._streams[writer] = left
        else:
            self._ended[writer] = now

    def leave(self, writer: WriterKey) -> None:
        """Notes that a writer has said that it sends nothing more."""
        self._left.add(writer)

    def forget(self, writer: WriterKey) -> None:
        """Lets go of what is known of a writer."""
        self._ended.pop(writer, None)
        self._left.discard(writer)

    def gone(self, writers: Iterable[WriterKey], now: float) -> list[WriterKey]:
        """Those that are gone: first those that have left, then the longest gone."""
        since = {each: self._since(each) for each in writers if each not in self._streams}
        return sorted((each for each in since if now - since[each] >= GONE_AFTER_S), key=since.__getitem__)

    def _since(self, writer: WriterKey) -> float:
        return -math.inf if writer in self._left else self._ended.get(writer, self.began)
