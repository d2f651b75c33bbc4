"""`dase top`: what it draws when, and how it ends."""

import asyncio
import os
import pty
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from children import importing
from observe.clusters import cluster, looks
from patience import PATIENCE_S
from replay.wire.services import promptly
from rich.console import Console

from dase_grpc.errors import UnreachableError, UsageError
from dase_grpc.observe.top import follow, top_here
from dase_grpc.observe.view import Look, Target
from dase_grpc.replay.wire.addresses import Address, ReplayPlace

AWAY = Look(2.0, None, {"r:1": UnreachableError("r:1 does not answer")})
ROOT = Path(__file__).resolve().parents[2]


class Watched:
    """A cluster that says one thing after the other, and what was drawn of it."""

    def __init__(self, *said: Look) -> None:
        self.said = list(said)
        self.screens = []
        self.stop = asyncio.Event()

    async def look(self) -> Look:
        return self.said.pop(0)

    def show(self, screen) -> None:
        self.screens.append(screen)
        if not self.said:
            self.stop.set()

    async def follow(self) -> None:
        await promptly(follow(self.look, self.show, self.stop, replays="r:1", every_s=0.0, clock=lambda: 9.0))


async def test_every_look_is_drawn_with_all_of_the_last_minute():
    watched = Watched(*looks(count=80))
    await watched.follow()
    assert [len(screen.looks) for screen in watched.screens] == [*range(1, 62), *[61] * 19]
    assert all(screen.last_known == screen.looks[-1] for screen in watched.screens)


async def test_a_replay_that_is_away_leaves_what_was_known_and_is_taken_up_again_when_it_is_back():
    before, after = Look(1.0, cluster(step=1)), Look(3.0, cluster(step=2))
    watched = Watched(before, AWAY, after)
    await watched.follow()
    assert [screen.last_known for screen in watched.screens] == [before, before, after]
    assert watched.screens[1].looks[-1] is AWAY


async def test_it_ends_although_a_look_does_not():
    stop = asyncio.Event()
    forever = asyncio.get_running_loop().create_future

    async def look() -> Look:
        stop.set()
        await forever()
        raise AssertionError

    await promptly(follow(look, lambda screen: None, stop, replays="r:1"))


def test_what_is_no_terminal_is_refused_naming_the_command_for_it(tmp_path):
    with (tmp_path / "out").open("w") as file, pytest.raises(UsageError, match="dase status prints the same"):
        top_here(Target(ReplayPlace.at(Address("127.0.0.1", 1))), Console(file=file))


class Terminal:
    """`dase top` on a terminal of its own, which a replay does not answer."""

    def __init__(self) -> None:
        self.master, self._slave = pty.openpty()
        termios.tcsetwinsize(self._slave, (24, 80))
        self.modes = termios.tcgetattr(self._slave)
        command = [sys.executable, "-m", "dase_grpc", "top", "--replay=127.0.0.1:1", "--timeout=0.2"]
        self.process = subprocess.Popen(
            command,
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
            process_group=0,  # which its parent could continue, so that the kernel stops it when asked
            env=importing(ROOT, TERM="xterm-256color"),
        )
        self.seen = b""

    @property
    def unchanged(self) -> bool:
        """Whether keys are shown and kept for a line, as before."""
        return termios.tcgetattr(self._slave)[3] == self.modes[3]

    def until(self, text: bytes) -> None:
        while text not in self.seen:
            self.seen += os.read(self.master, 65_536)

    def end(self) -> tuple[int, bool]:
        """Its exit code, and whether the terminal is as it was."""
        self.until(b"\x1b[?1049l")  # the screen from before is back
        code = self.process.wait(PATIENCE_S)
        unchanged = self.unchanged
        os.close(self.master)
        os.close(self._slave)
        return code, unchanged


@pytest.mark.slow
def test_q_and_ctrl_c_end_it_well_and_leave_the_terminal_as_it_was():
    with_q, with_signal = Terminal(), Terminal()
    for each in (with_q, with_signal):
        each.until(b"no replay has answered yet")
    os.write(with_q.master, b"q")
    with_signal.process.send_signal(signal.SIGINT)
    assert (with_q.end(), with_signal.end()) == ((0, True), (0, True))


@pytest.mark.slow
def test_ctrl_z_gives_the_terminal_back_until_it_is_continued():
    top = Terminal()
    top.until(b"no replay has answered yet")
    top.process.send_signal(signal.SIGTSTP)
    _, status = os.waitpid(top.process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    top.until(b"\x1b[?1049l")
    assert top.unchanged
    top.seen = b""
    top.process.send_signal(signal.SIGCONT)
    top.until(b"\x1b[?1049h")  # the screen of its own
    top.until(b"no replay has answered yet")
    assert not top.unchanged
    os.write(top.master, b"q")
    assert top.end() == (0, True)
