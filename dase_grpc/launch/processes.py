"""Nodes as child processes: each has a name, a log, an address and a leash."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dase_grpc.errors import NodeFailedError
from dase_grpc.launch.forks import ForkedProcess, ForkServer, node_variables
from dase_grpc.process.containment import given_variables
from dase_grpc.process.lifecycle import READY_PREFIX
from dase_grpc.replay.wire.addresses import Address, parse_address
from dase_grpc.runs.files import end_of

PROGRAM: Final = (sys.executable, "-m", "dase_grpc")
"""The command that is `dase`."""

ERROR_PREFIX: Final = "error: "
"""What the sentence begins with by which `dase` says why it ends."""

ANY_PORT: Final = Address("127.0.0.1", 0)
STOP_S: Final = 45.0
SHOWN_LOG_LINES: Final = 100
SHOWN_REASON: Final = 200
"""Characters of the last line of a log that say why its process ended."""


@dataclass(eq=False)
class Node:
    """A child process. Its stdin is a pipe whose other end only this process holds: the leash.

    It leads a process group of its own, in which is what it has started and has not let go of. It was
    started at `started_s` on the event loop's clock, `again` if in the place of one that had failed; a
    replay was `heard` of when it has answered, a learner when it has sent a heartbeat.
    """

    name: str
    process: Process | ForkedProcess
    log: Path
    started_s: float = 0.0
    again: bool = False
    heard: bool = False
    killed_because: str = ""
    _group_killed: bool = field(default=False, init=False)

    @property
    def runs(self) -> bool:
        """Whether the process has not ended yet."""
        return self.process.returncode is None

    @property
    def is_restarting(self) -> bool:
        """Whether it takes the place of one that had failed, and has not been heard of yet."""
        return self.again and not self.heard

    def kill(self, because: str) -> None:
        """Kills it at once, with all that it has started, unless it has ended."""
        if self.runs:
            self.killed_because = because
            kill_nodes([self])

    async def ended(self) -> int:
        """Returns the exit code once the process has ended, however; kills then what it has left behind.

        Simulators do not notice that the process that started them is gone, and a forked one holds what
        that one held: the lock on an agent's folder, a port.
        """
        code = await self.process.wait()
        if not self._group_killed:  # only once, for the system may give the number to another later
            self._group_killed = True
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        return code

    def failure(self, what: str) -> NodeFailedError:
        """An error that says what happened, how the process ended if it has, and the end of its log."""
        code = self.process.returncode
        how = "" if code is None else f" ({self._how(code)})"
        text = f"{self.name} {what}{how}; the end of {self.log}:\n{_tail(self.log)}"
        return NodeFailedError(text, code=code)

    @property
    def ending(self) -> str:
        """How the process ended, and what it said last if it was not killed."""
        code = self.process.returncode
        if code is None:
            return "it still runs"
        last = _tail(self.log).rpartition("\n")[2].strip()
        return self._how(code) if code <= 0 else f"{exit_text(code)}, {shortened(last, SHOWN_REASON)}"

    def _how(self, code: int) -> str:
        return f"killed, for {self.killed_because}" if self.killed_because else exit_text(code)


def shortened(text: str, length: int) -> str:
    """The text's beginning, in at most so many characters."""
    return text if len(text) <= length else f"{text[: length - 3]}..."


def _tail(log: Path) -> str:
    try:
        lines = end_of(log).splitlines()
    except OSError as error:
        return f"(it cannot be read: {error.strerror or error})"
    return "\n".join(lines[-SHOWN_LOG_LINES:]) or "(empty)"


def node_arguments(role: str, **flags: object) -> list[str]:
    """Arguments of `dase` for a node on a leash; flags that are None or False are left out."""
    found = ["node", "--stdin-is-leash", f"--role={role}"]
    for name, value in flags.items():
        if value is not None and value is not False:
            flag = f"--{name.replace('_', '-')}"
            found.append(flag if value is True else f"{flag}={value}")
    return found


async def start_node(
    name: str,
    command: Sequence[str],
    *,
    log: Path,
    threads: int,
    read_stdout: bool = False,
    again: bool = False,
    keeps_open: Sequence[int] = (),
    forks: ForkServer | None = None,
) -> Node:
    """Starts a process in a session of its own, so that the terminal's Ctrl-C does not reach it.

    stderr goes to `log`, and stdout too unless the caller reads it; after what is there where the node is
    started `again`. The file descriptors in `keeps_open` stay open in the process until it ends. `forks` are
    asked for it first, if the command is `PROGRAM`. Cancelled, it leaves no process behind.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab" if again else "wb") as file:
        forked = None
        if forks is not None and tuple(command[: len(PROGRAM)]) == PROGRAM:
            forked = await forks.start(command[len(PROGRAM) :], file)
        process = forked or await asyncio.create_subprocess_exec(
            *command,
            stdin=PIPE,
            stdout=PIPE if read_stdout else file,
            stderr=file,
            # what an environment has set while it was tried out is for itself; in a node it does so again
            env=node_variables(given_variables(), threads=threads),
            start_new_session=True,
            pass_fds=keeps_open,
        )
    return Node(name, process, log, asyncio.get_running_loop().time(), again)


async def end_nodes(nodes: Sequence[Node], *, within_s: float = STOP_S) -> None:
    """Asks nodes to end and returns when they have, and nothing is left of what they have started.

    Those that need longer than `within_s` are killed; so are all that are left when this is cancelled.
    """
    for node in nodes:
        if node.runs:
            with suppress(ProcessLookupError):
                # not Popen's own, which polls first and so may take the exit code away from asyncio
                os.kill(node.process.pid, signal.SIGTERM)
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await _ended(nodes)
    finally:
        kill_nodes(nodes)
        await _ended(nodes)


def kill_nodes(nodes: Sequence[Node]) -> None:
    """Kills nodes at once, with all that they have started; may be called from a signal handler."""
    for node in nodes:
        if node.runs:
            with suppress(ProcessLookupError):
                os.killpg(node.process.pid, signal.SIGKILL)


async def _ended(nodes: Sequence[Node]) -> None:
    for node in nodes:
        await node.ended()


def exit_text(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


async def listening_address(node: Node, *, within_s: float) -> Address:
    """The address that a node prints once it answers; its stdout is a pipe.

    Raises:
        NodeFailedError: it ended or stayed silent instead.
    """
    if node.process.stdout is None:
        raise TypeError(f"the stdout of {node.name} is not a pipe")
    try:
        async with asyncio.timeout(within_s):
            line = (await node.process.stdout.readline()).decode(errors="replace").strip()
            if not line:
                await node.ended()
    except TimeoutError:
        raise node.failure(f"did not answer within {within_s:g} s") from None
    if not line.startswith(READY_PREFIX):
        raise node.failure(f"said {line!r} instead of its address" if line else "could not start")
    return parse_address(line.removeprefix(READY_PREFIX))
