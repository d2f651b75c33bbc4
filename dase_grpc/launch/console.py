"""A command's console: its sentences, and how it was called."""

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console


class PatientConsole(Console):
    """A console whose reader may go away: training goes on without one."""

    def on_broken_pipe(self) -> None:
        """Shows nothing any more, now that nobody reads it."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def say(console: Console, text: str) -> None:
    """Prints a line as it is, however long; nothing in it is markup."""
    console.print(text, highlight=False, soft_wrap=True, markup=False)


def program(command: Sequence[str]) -> str:
    """How this program was called, so that a line with another of its commands can be pasted.

    command is sys.argv; what the shell finds by its name alone is named by that.
    """
    called = Path(command[0] if command else "dase")
    if called.name == "__main__.py":
        return f"{_as_found(Path(sys.executable))} -m dase_grpc"
    return _as_found(called)


def _as_found(called: Path) -> str:
    found = shutil.which(called.name)
    if called.name == str(called) or (found is not None and Path(found) == called):
        return called.name
    return shlex.quote(str(called))
