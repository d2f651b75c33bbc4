"""Nodes that are forked from a process that has imported what they need, as if each were started alone."""

import errno
import itertools
import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from children import importing, lives, until_ended
from patience import PATIENCE_S
from replay.wire.services import eventually

from dase_grpc.launch import forks as launch_forks
from dase_grpc.launch.forks import ForkedProcess, ForkServer, fork_server
from dase_grpc.launch.processes import PROGRAM, Node, end_nodes, node_arguments, start_node
from dase_grpc.process.lifecycle import READY_PREFIX

REPLAY = node_arguments("replay", listen="127.0.0.1:0", capacity=100, min_size=1)
VERSION = ("--version",)


@pytest.fixture
def forks():
    """Makes fork servers, which import only what a test has them import."""
    with ExitStack() as stack:

        def make(*imported: str) -> ForkServer:
            server = stack.enter_context(fork_server(threads=1, imported=imported))
            assert server is not None
            return server

        yield make


@pytest.fixture
def start(tmp_path):
    """Starts `dase` by a fork server."""

    async def start(server: ForkServer, *arguments: str, name: str = "node") -> Node:
        log = tmp_path / f"{name}.log"
        return await start_node(name, (*PROGRAM, *arguments), log=log, threads=1, forks=server)

    return start


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def command(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")


async def test_a_fork_is_the_launchers_own_child_and_shows_the_command_of_a_node(forks, start):
    server = forks()
    node = await start(server, *REPLAY)
    await eventually(lambda: READY_PREFIX in node.log.read_text())
    pid = node.process.pid
    assert parent(pid) == os.getpid()
    assert command(pid) == [sys.executable, "-m", "dase_grpc", *REPLAY]
    assert (os.getsid(pid), os.getpgid(pid)) == (pid, pid)
    await end_nodes([node])
    assert node.process.returncode == 0
    assert not node.runs


@pytest.mark.slow
async def test_forks_outlive_their_server_and_end_with_their_leash(forks, start):
    server = forks()
    nodes = [await start(server, *REPLAY, name=name) for name in ("killed", "let-go")]
    server.close()
    for node in nodes:
        await eventually(lambda node=node: READY_PREFIX in node.log.read_text())
    killed, let_go = nodes
    killed.kill("a test")
    assert await killed.ended() == -signal.SIGKILL
    os.close(let_go.process._leash)
    let_go.process._leash = os.open(os.devnull, os.O_RDONLY)
    assert await let_go.ended() == 0
    assert "the launcher is gone" in let_go.log.read_text()


async def test_a_fork_ends_with_its_own_exit_code_and_says_why(forks, start):
    server = forks()
    nodes = [await start(server, *VERSION, name="well"), await start(server, "node", "--role=x", name="ill")]
    assert [await node.ended() for node in nodes] == [0, 2]
    assert nodes[0].log.read_text().startswith("0.")
    assert "--role 'x' is none of the roles" in nodes[1].log.read_text()


async def test_without_its_server_a_node_is_started_on_its_own(forks, start):
    server = forks("there_is_no_such_module")
    for name in ("first", "second"):
        node = await start(server, *VERSION, name=name)
        assert await node.ended() == 0
        assert node.log.read_text()
    assert not lives(server._process.pid)


@pytest.mark.slow
async def test_without_a_server_that_stands_still_nodes_are_started_on_their_own(forks, start, caplog):
    importing_still, ready = forks("dase_grpc.cli.main"), forks()
    assert await (await start(ready, *VERSION, name="before")).ended() == 0
    for server in (importing_still, ready):
        os.kill(server._process.pid, signal.SIGSTOP)
    importing_still.look_s = 0.1
    ready._control.settimeout(0.1)
    for name, server in (("importing", importing_still), ("ready", ready)):
        caplog.clear()
        node = await start(server, *VERSION, name=name)
        assert await node.ended() == 0
        assert "does not answer, so nodes are started without it" in caplog.text
        assert not lives(server._process.pid)


async def test_a_server_that_takes_long_and_works_is_waited_for(forks, start, tmp_path, monkeypatch, caplog):
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(1)\n")
    monkeypatch.setenv("PYTHONPATH", importing(tmp_path)["PYTHONPATH"])
    monkeypatch.setattr(launch_forks, "ANSWER_S", PATIENCE_S)
    spent_s = itertools.count()
    monkeypatch.setattr(launch_forks, "_cpu_s", lambda pid: next(spent_s))
    server = forks("slow")
    server.look_s = 0.1
    node = await start(server, *VERSION)
    assert isinstance(node.process, ForkedProcess)
    assert await node.ended() == 0
    assert caplog.text.count("waiting for the fork server") == 1


async def test_a_server_in_which_a_library_has_started_a_thread_forks_nothing(
    forks, start, tmp_path, monkeypatch
):
    (tmp_path / "threaded.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    monkeypatch.setenv("PYTHONPATH", importing(tmp_path)["PYTHONPATH"])
    server = forks("threaded")
    with (tmp_path / "log").open("wb") as log:
        assert await server.start(VERSION, log) is None
    assert not (tmp_path / "log").read_text()


@pytest.mark.slow
async def test_forks_draw_numbers_of_their_own(forks, start, tmp_path, monkeypatch):
    (tmp_path / "drawn.py").write_text(
        "import random, numpy\nprint('drawn', numpy.random.random(), random.random(), flush=True)\n"
    )
    monkeypatch.setenv("PYTHONPATH", importing(tmp_path)["PYTHONPATH"])
    server, drawn = forks("numpy.random,random"), []
    for name in ("first", "second"):
        node = await start(server, "train", "--env=drawn:Nothing", "--lockstep", name=name)
        assert await node.ended() == 2
        drawn.append([line for line in node.log.read_text().splitlines() if line.startswith("drawn")])
    assert len(drawn[0]) == len(drawn[1]) == 1
    assert not set(drawn[0][0].split()[1:]) & set(drawn[1][0].split()[1:])


@pytest.mark.slow
async def test_a_server_ends_with_its_block_and_with_its_launcher(forks, start):
    with fork_server(threads=1, imported=()) as server:
        assert server is not None
        assert await (await start(server, *VERSION)).ended() == 0
        kept = server._process.pid
    until_ended(kept)
    other = forks()
    assert await (await start(other, *VERSION)).ended() == 0
    other._control.close()  # as when the launcher is killed
    until_ended(other._process.pid)


def test_there_is_no_server_where_it_is_not_wanted_or_the_system_has_no_such_processes(monkeypatch):
    with fork_server(threads=1, wanted=False) as unwanted:
        assert unwanted is None
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        with fork_server(threads=1) as elsewhere:
            assert elsewhere is None

    def unknown(pid):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "pidfd_open", unknown)  # as on a kernel before 5.3
    with fork_server(threads=1) as on_an_old_kernel:
        assert on_an_old_kernel is None
