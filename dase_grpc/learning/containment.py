"""Keeps what an environment does and raises from acting on the machinery around it."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Self

MEANT_FOR_OTHERS = (StopIteration, StopAsyncIteration, GeneratorExit, SystemExit, KeyboardInterrupt)


STANDARD_STREAMS = (0, 1, 2)


class Contained:
    """A block whose StopIteration, SystemExit and the like leave it as a RuntimeError.

    Raised by an environment they are bugs like any other, but a loop, a generator, a future or the
    interpreter would take them for its own end: quietly, or with exit code 0.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and issubclass(kind, MEANT_FOR_OTHERS):
            raise RuntimeError(f"the environment or the agent raised {kind.__name__}({error})") from error


@contextmanager
def process_kept() -> Iterator[None]:
    """After the block each signal has the handler it had before, and the standard streams are open.

    Simulators set handlers, or close what they inherited, while they are made. Only the main thread can set
    a handler, so elsewhere there is none to put back.
    """
    in_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()} if in_main else {}
    copies = dict(_copies())
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        for stream, copy in copies.items():
            if not _is_open(stream):
                os.dup2(copy, stream)
            os.close(copy)


def _copies() -> Iterator[tuple[int, int]]:
    for stream in STANDARD_STREAMS:
        with suppress(OSError):  # it was closed before
            yield stream, os.dup(stream)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
