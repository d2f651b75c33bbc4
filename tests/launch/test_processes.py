"""Nodes as child processes: how they end, with all that they have started, and what is said of it."""

import os
import sys

import pytest
from children import lives
from replay.wire.services import eventually

from dase_grpc.launch import processes
from dase_grpc.launch.processes import end_nodes, exit_text, node_arguments, start_node


@pytest.fixture
def start(tmp_path):
    """Starts a Python program as a node."""

    async def start(code, **options):
        command = (sys.executable, "-c", code)
        return await start_node("node", command, log=tmp_path / "node.log", threads=1, **options)

    return start


SLEEPER = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True)"


async def test_killing_a_node_kills_what_it_has_started(start):
    node = await start(
        f"import signal; signal.signal(15, lambda *_: 0); {SLEEPER}; input()", read_stdout=True
    )
    assert node.process.stdout is not None
    child = int(await node.process.stdout.readline())
    await end_nodes([node], within_s=0.1)
    assert node.process.returncode == -9
    await eventually(lambda: not lives(child))


async def test_ending_a_node_that_has_ended_kills_what_it_has_left_behind(start):
    node = await start(SLEEPER)
    await node.process.wait()
    child = int(node.log.read_text())
    assert lives(child)
    await end_nodes([node])
    await end_nodes([])
    assert node.process.returncode == 0
    await eventually(lambda: not lives(child))


async def test_a_failure_shows_the_end_of_a_long_log_even_if_it_is_no_text(start):
    node = await start("import os; os.write(2, b'line\\n' * 1000 + b'\\xff last')")
    await node.process.wait()
    text = str(node.failure("ended"))
    assert text.startswith(f"node ended (exit code 0); the end of {node.log}:\n")
    assert len(text.splitlines()) == 1 + processes.SHOWN_LOG_LINES
    assert text.endswith("\ufffd last")


async def test_of_a_log_however_long_only_the_end_is_read(start):
    node = await start("")
    await node.ended()
    with node.log.open("wb") as file:
        file.truncate(2**40)  # takes no room on the disk
        file.seek(0, os.SEEK_END)
        file.write(b"\nlast")
    assert str(node.failure("ended")).endswith("\nlast")


@pytest.mark.parametrize(
    ("code", "text"),
    [(0, "exit code 0"), (2, "exit code 2"), (-9, "killed by SIGKILL"), (-63, "killed by signal 63")],
)
def test_the_end_of_a_process_is_told_in_words(code, text):
    assert exit_text(code) == text


def test_what_a_node_is_not_told_is_no_argument():
    flags = {"metrics_port": 0, "resume": True, "data_dir": None, "insecure": False}
    assert node_arguments("replay", **flags)[2:] == ["--role=replay", "--metrics-port=0", "--resume"]
