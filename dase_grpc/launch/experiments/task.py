"""A cell as the task of a job array, and the exit codes of commands that run cells.

Every task imports this beside the cell's own processes, so it imports hardly anything itself.
"""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from submitit.core.utils import DelayedSubmission

ALL_FINISHED: Final = 0
SOME_FAILED: Final = 1
NOTHING_KEPT: Final = 75
STOPPED: Final = 130
"""Exit codes; 2 is for what is refused before anything starts. 130 is what shells give to a Ctrl-C; 75 is for
one cell that was stopped before it had kept a step more than it began with."""

LOOK_EVERY_S: Final = 0.5
"""How often a task looks whether its cell has ended."""

IN_VAIN: Final = 3
"""How often in a row a task is queued again whose cell has kept nothing."""


@dataclass
class CellTask:
    """What a task of the array does: it runs a cell as a process, and has it stop before the time limit.

    submitit pickles it, and calls `checkpoint` in a signal handler on the signal before the limit; so it
    holds nothing but texts and a number, and waits without any lock of Python's.
    """

    command: Sequence[str]
    folder: str
    in_vain: int = 0
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False, repr=False)

    def __call__(self, cell: str) -> None:
        """Returns when the cell has finished; else it exits as the cell's process did."""
        # Slurm's signal goes to all processes of a task, and would kill those that do not expect it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
        try:
            self._process = subprocess.Popen([*self.command, f"--cell={cell}"], cwd=self.folder)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})
        if code := _exit_code(self._process):
            raise SystemExit(code)

    def checkpoint(self, cell: str) -> "DelayedSubmission":
        """Has the cell stop; returns once it has kept its state what is to be queued again.

        It exits instead where the cell has ended, or has kept nothing for several times in a row.
        """
        from submitit.core.utils import DelayedSubmission

        # Slurm may send it twice; the second would find submitit in the middle of writing.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
        code, in_vain = STOPPED, self.in_vain
        if self._process is not None:
            self._process.terminate()
            code = _exit_code(self._process)
        if code not in (STOPPED, NOTHING_KEPT, 128 + signal.SIGTERM):
            raise SystemExit(code)
        in_vain = 0 if code == STOPPED else in_vain + 1
        if in_vain > IN_VAIN:
            print(f"{cell} has kept nothing {in_vain} times in a row; raise slurm.time_minutes")  # noqa: T201
            raise SystemExit(code)
        return DelayedSubmission(CellTask(self.command, self.folder, in_vain), cell)


def _exit_code(process: subprocess.Popen[bytes]) -> int:
    """Waits for a process; its exit code, as shells give it to one that was killed.

    Popen's own wait holds a lock, which a signal handler that waits too would not get. And a signal just
    before a wait without end would be handled only after it.
    """
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        time.sleep(LOOK_EVERY_S)
    code = process.wait()
    return code if code >= 0 else 128 - code
