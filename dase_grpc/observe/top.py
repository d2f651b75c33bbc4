"""`dase top`: looks again and again, draws what it sees, and heeds single keys."""

import asyncio
import os
import signal
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Final

from rich.console import Console
from rich.live import Live

from dase_grpc.errors import UnreachableError, UsageError
from dase_grpc.observe.screen import KEPT_LOOKS, Frame, Screen
from dase_grpc.observe.view import Look, Target, first_look, observing
from dase_grpc.process.lifecycle import stop_event
from dase_grpc.process.tasks import unless

REDRAW_S: Final = 1.0
QUIT: Final = frozenset("qQ")


def top_here(target: Target, console: Console) -> None:
    """Shows a cluster until q, Ctrl-C or SIGTERM; Ctrl-Z gives the terminal back meanwhile.

    Raises:
        UsageError: there is no terminal to draw on.
        RefusalError: at first the replay refuses; in one sentence. Where it is only away, it is waited for.
    """
    if not console.is_terminal or console.is_dumb_terminal:
        raise UsageError(
            "dase top draws on a terminal, and its output goes to none; dase status prints the same once"
        )
    asyncio.run(_top(target, console))


async def _top(target: Target, console: Console) -> None:
    async with stop_event(stdin_is_leash=False) as stop, observing(target) as observer:
        with suppress(UnreachableError):
            await unless(stop, first_look(observer))
        loop = asyncio.get_running_loop()
        live = Live(console=console, screen=True, auto_refresh=False)

        @contextmanager
        def on_terminal() -> Iterator[None]:
            with keys(loop, lambda key: stop.set() if key in QUIT else None), live:
                yield

        with suspendable(loop, on_terminal):
            await follow(
                observer.look,
                lambda frame: live.update(Screen(frame), refresh=True),
                stop,
                replays=str(target.replay),
            )


async def follow(
    look: Callable[[], Coroutine[None, None, Look]],
    show: Callable[[Frame], None],
    stop: asyncio.Event,
    *,
    replays: str,
    every_s: float = REDRAW_S,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Looks and shows, `every_s` seconds apart, until `stop`."""
    looks: deque[Look] = deque(maxlen=KEPT_LOOKS)
    last_known: Look | None = None
    while not stop.is_set():
        began = clock()
        seen = await unless(stop, look())
        if seen is None:
            return
        looks.append(seen)
        last_known = seen if seen.cluster is not None else last_known
        show(Frame(replays, tuple(looks), clock(), last_known))
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), max(0.0, began + every_s - clock()))


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


@contextmanager
def suspendable(
    loop: asyncio.AbstractEventLoop, taking: Callable[[], AbstractContextManager[object]]
) -> Iterator[None]:
    """Holds what `taking` takes while the block runs, but not while SIGTSTP has stopped the process.

    Where that signal is ignored it stays so. In a process group that nobody could continue the kernel
    drops it, and the terminal is taken again at once.
    """
    with ExitStack() as held:
        held.enter_context(taking())
        if signal.getsignal(signal.SIGTSTP) is signal.SIG_IGN:
            yield
            return

        def suspend() -> None:
            held.close()
            loop.remove_signal_handler(signal.SIGTSTP)
            signal.raise_signal(signal.SIGTSTP)  # returns once SIGCONT has come
            loop.add_signal_handler(signal.SIGTSTP, suspend)
            held.enter_context(taking())

        loop.add_signal_handler(signal.SIGTSTP, suspend)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGTSTP)
