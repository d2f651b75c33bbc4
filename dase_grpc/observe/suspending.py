"""Ctrl-Z for what has taken over a terminal: the shell gets it back as it was."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager


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
