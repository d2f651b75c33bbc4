"""Single keys from a terminal, without Enter and without showing them."""

import asyncio
import os
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def keys(loop: asyncio.AbstractEventLoop, on_key: Callable[[str], None]) -> Iterator[None]:
    """Calls `on_key` with each key while the block runs; the terminal is then as it was before.

    Where standard input is no terminal there are no keys. Ctrl-C and Ctrl-Z stay signals.
    """
    if not sys.stdin.isatty():
        yield
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)

    def read() -> None:
        pressed = os.read(terminal, 64)
        if not pressed:  # hung up
            loop.remove_reader(terminal)
        for key in pressed.decode(errors="ignore"):
            on_key(key)

    tty.setcbreak(terminal, termios.TCSANOW)
    loop.add_reader(terminal, read)
    try:
        yield
    finally:
        loop.remove_reader(terminal)
        termios.tcsetattr(terminal, termios.TCSANOW, before)
