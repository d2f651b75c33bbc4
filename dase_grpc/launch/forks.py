"""Forks: nodes forked from one process that has imported what all of them need.

To import torch takes longer than everything else that a node does before its first step, and K nodes that
start together would each do so. The fork server does it once, while its launcher checks the settings and
starts the replay. It has a single thread and knows nothing of gRPC, of a GPU and of the environment: what it
forks comes by them as a process of its own would. It ends when all are started.

`python -m dase_grpc.launch.forks` is the server; it is for the launcher alone.
"""

import asyncio
import ctypes
import gc
import importlib
import json
import logging
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Final

from dase_grpc.process import ends
from dase_grpc.replay.security.identity import without_credentials

IMPORTED: Final = (
    "dase_grpc.cli.main",
    "dase_grpc.learning.training.build",
    "dase_grpc.learning.envs.restarts",
    "dase_grpc.metrics.endpoint",
    "dase_grpc.runs.journal",
)
"""What a learner needs, but for gRPC, and for MuJoCo, of which an environment may choose the renderer."""

READY_S: Final = 60.0
"""How long the server may import; then nodes are started without it."""

LOOK_S: Final = 5.0
"""How often it is looked whether it still imports: whoever stands still has no processor time meanwhile."""

ANSWER_S: Final = 10.0
"""How long a fork may take, in which the launcher waits."""

_READY: Final = b"ready"
_LONGEST_REQUEST: Final = 65_536
_ROOM: Final = 8_192
"""Bytes that the server's command line is made longer by, so that a node's own fits in its place."""

_SET_SUBREAPER: Final = 36
"""PR_SET_CHILD_SUBREAPER of linux/prctl.h."""

log = logging.getLogger("dase")


def node_variables(variables: Mapping[str, str], *, threads: int) -> dict[str, str]:
    """The environment of a node, without credentials: those of one machine talk on loopback, without TLS."""
    limits = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    return without_credentials(variables) | limits


# --- the launcher's side ------------------------------------------------------------------------------------


class ForkedProcess:
    """A child of this process that a fork server has made; has what `Node` needs of asyncio's `Process`.

    Its stdin is the leash, whose other end is here. Belongs to the event loop on which it is made.
    """

    stdout = None

    def __init__(self, pid: int, pidfd: int, leash: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._pidfd = pidfd
        self._leash = leash
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._loop.add_reader(pidfd, self._end)

    async def wait(self) -> int:
        """Returns the exit code once the process has ended; negative where a signal has killed it."""
        await asyncio.wait([self._ended])
        return self._ended.result()

    def _end(self) -> None:
        self._loop.remove_reader(self._pidfd)
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        for descriptor in (self._pidfd, self._leash):
            os.close(descriptor)
        self._ended.set_result(self.returncode)


class ForkServer:
    """The process that forks nodes, seen from the launcher."""

    def __init__(
        self, process: subprocess.Popen[bytes], control: socket.socket, *, look_s: float = LOOK_S
    ) -> None:
        self.look_s = look_s
        self._process = process
        self._control = control
        self._is_ready = False

    async def start(self, arguments: Sequence[str], output: IO[bytes]) -> ForkedProcess | None:
        """Has `dase` forked, in a session of its own, with its output in a file; may be cancelled.

        None where there is no server any more or it fails; then nothing was started, and it is closed. What
        makes others wait for long is logged.
        """
        try:
            await self._until_ready()
            return self._fork(json.dumps(arguments).encode(), output)
        except OSError as error:
            if isinstance(error, TimeoutError):
                log.warning("the fork server does not answer, so nodes are started without it")
            self.close()
            return None

    def close(self) -> None:
        """Ends the server; what it has forked stays."""
        self._process.kill()
        self._process.wait()
        self._control.close()

    async def _until_ready(self) -> None:
        if not self._is_ready:
            self._control.setblocking(False)
            said = await self._first_word()
            if said != _READY:
                raise ConnectionError("the fork server has ended")
            self._is_ready = True
            self._control.settimeout(ANSWER_S)

    async def _first_word(self) -> bytes:
        """What the server says once it has imported; TimeoutError where it stands still, or is too slow."""
        loop, spent_s = asyncio.get_running_loop(), _cpu_s(self._process.pid)
        began, said = loop.time(), False
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self.look_s):
                    return await loop.sock_recv(self._control, len(_READY))
            before_s, spent_s = spent_s, _cpu_s(self._process.pid)
            if spent_s == before_s or loop.time() - began > READY_S:
                raise TimeoutError
            if not said:
                log.warning("waiting for the fork server, which still imports what all nodes need")
            said = True

    def _fork(self, request: bytes, output: IO[bytes]) -> ForkedProcess:
        """Waits for the fork without giving way to others, so that nobody can cancel it half done."""
        theirs, leash = os.pipe()
        try:
            with _adopting():
                socket.send_fds(self._control, [request], [theirs, output.fileno()])
                pid = int(self._control.recv(_LONGEST_REQUEST) or -1)
            if pid < 0:
                raise ConnectionError("the fork server has ended")
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # raises where it is no child
            return ForkedProcess(pid, os.pidfd_open(pid), leash)
        except BaseException:
            os.close(leash)  # which ends what was forked
            raise
        finally:
            os.close(theirs)


def _cpu_s(pid: int) -> float:
    """The processor time that a process has had so far; 0 where that is not told."""
    try:
        user, system = ends.stat_fields(Path(f"/proc/{pid}/stat"))[11:13]
    except (OSError, ValueError):
        return 0.0
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


@contextmanager
def fork_server(
    *, threads: int, wanted: bool = True, imported: Sequence[str] = IMPORTED
) -> Iterator[ForkServer | None]:
    """A server that imports while the block goes on, and ends with it; None where there can be none.

    Its forks compute on so many `threads`.
    """
    if not wanted or not _knows_pidfds():
        yield None
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno()), ",".join(imported), " " * _ROOM],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # what cannot be imported, a node without it says in its log
            env=node_variables(os.environ, threads=threads),
            start_new_session=True,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        server = ForkServer(process, ours)
        try:
            yield server
        finally:
            server.close()


def _knows_pidfds() -> bool:
    """Whether forks can be waited for; an old kernel, and some containers, refuse what Python knows of."""
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


@contextmanager
def _adopting() -> Iterator[None]:
    """Makes processes whose parents end in the block children of this one."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_SET_SUBREAPER, ctypes.c_ulong(1))
    try:
        yield
    finally:
        prctl(_SET_SUBREAPER, ctypes.c_ulong(0))


# --- the server's side --------------------------------------------------------------------------------------


def main() -> None:
    """Imports, then forks what is asked for; each fork goes on as `python -m dase_grpc` would."""
    ends.put_right()
    control = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()  # nothing of what is imported is garbage
    for name in filter(None, sys.argv[2].split(",")):
        importlib.import_module(name)
    if len(os.listdir("/proc/self/task")) > 1:
        sys.exit("a library has started a thread, which a fork would be without")
    gc.freeze()  # so that no fork's garbage collection copies pages that all share
    gc.enable()
    arguments = serve(control)
    if arguments is not None:
        sys.argv[1:] = arguments
        runpy.run_module("dase_grpc", run_name="__main__", alter_sys=True)


def serve(control: socket.socket) -> list[str] | None:
    """Forks for as long as the launcher asks; returns in each fork with its arguments, in the end with None.

    A fork is at once an orphan, which the launcher adopts: it alone waits for it.
    """
    control.sendall(_READY)
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, _LONGEST_REQUEST, 2)
        if not request:
            return None
        told, tell = os.pipe()
        if (between := os.fork()) == 0:
            os.close(told)
            control.close()
            if os.fork():
                os._exit(0)
            arguments: list[str] = json.loads(request)
            _begin(arguments, *descriptors)
            os.write(tell, str(os.getpid()).encode())
            os.close(tell)
            return arguments
        for each in (tell, *descriptors):
            os.close(each)
        os.waitpid(between, 0)
        control.sendall(os.read(told, _LONGEST_REQUEST))
        os.close(told)


def _begin(arguments: Sequence[str], stdin: int, log: int) -> None:
    """Makes this fork what a process is that was just started."""
    import numpy as np  # which the launcher's side has no need of

    os.setsid()
    for descriptor, number in ((stdin, 0), (log, 1), (log, 2)):
        os.dup2(descriptor, number)
    for descriptor in (stdin, log):
        os.close(descriptor)
    _be_called([sys.executable, "-m", "dase_grpc", *arguments])
    np.random.seed()  # noqa: NPY002 - for environments that draw from it; all others seed themselves


def _be_called(command: Sequence[str]) -> None:
    """Puts a command line in the place of this process's own, for ps and all that look for a node.

    One that is too long is cut off; where the kernel does not say where that place is, nothing is done.
    """
    fields = ends.stat_fields(Path("/proc/self/stat"))
    begin, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, proc(5)
    if begin and (room := end - begin) > 0:
        text = b"\0".join(map(os.fsencode, command))[: room - 1]
        ctypes.memmove(begin, text.ljust(room, b"\0"), room)


if __name__ == "__main__":
    main()
