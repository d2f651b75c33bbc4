"""A node's process: exit codes, signals, and what stands in its log."""

import logging
import os
import signal
import textwrap
from contextlib import contextmanager

import pytest
from children import end_of, python, until_ended
from patience import PATIENCE_S
from process.programs import HANGS, node, ready

from dase_grpc.process import signals
from dase_grpc.process.lifecycle import halt_event, run_node

ANY_IS_A_SECOND_ONE = "signals.SAME_REQUEST_S = 0.0\n"
STOPPING = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
BUG = "ZeroDivisionError: division by zero\n"


def test_a_node_that_is_done_exits_0():
    with node("async def main(stop): pass") as process:
        assert end_of(process) == (0, "", "")


ONE = "async def main(stop): raise {error}('it is so; do that')"
NESTED = """
async def fail():
    raise {error}("it is so; do that")

async def main(stop):
    async with asyncio.TaskGroup() as outer:
        async def inner():
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(fail())
        outer.create_task(inner())
"""


@pytest.mark.parametrize(
    ("error", "code", "main"),
    [
        ("DrainingError", 1, ONE),
        ("UnreachableError", 1, ONE),
        ("DaseError", 1, ONE),
        ("ConfigError", 2, ONE),
        ("AddressError", 2, ONE),
        ("EnvironmentSpecError", 2, ONE),
        ("ConfigError", 2, NESTED),
    ],
)
def test_an_error_of_ours_is_one_line_in_the_log_and_a_code(error, code, main):
    with node(main.format(error=error)) as process:
        returned, _, log = end_of(process)
    assert returned == code
    assert log.endswith("tester | error: it is so; do that\n")
    assert len(log.splitlines()) == 1


def test_a_node_that_ends_in_a_hang_takes_with_it_what_it_has_started():
    main = """
    async def main(stop):
        inner = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid, flush=True); input()"
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", inner, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        print((await child.stdout.readline()).decode().strip(), child.pid, flush=True)
        raise EnvironmentHangsError("it does not return")
    """
    with node(main) as process:
        started = [int(text) for text in process.stdout.readline().split()]
        assert process.wait(timeout=PATIENCE_S) == 1
        assert len(started) == 2
        until_ended(*started)


BESIDE_A_REFUSAL = """
async def refuse():
    raise DrainingError("over")

async def fail():
    return 1 / 0

async def main(stop):
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(refuse())
        tasks.create_task(fail())
"""


@pytest.mark.parametrize(
    ("main", "place"), [("async def main(stop): return 1 / 0", "in main"), (BESIDE_A_REFUSAL, "in fail")]
)
def test_a_bug_keeps_its_traceback_and_exits_1_also_beside_refusals(main, place):
    with node(main) as process:
        returned, _, log = end_of(process)
    assert returned == 1
    assert place in log
    assert log.endswith(BUG)


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name
)
def test_a_signal_stops_the_node_which_drains_and_exits_0(number):
    with node() as process:
        ready(process)
        process.send_signal(number)
        returned, output, log = end_of(process)
    assert (returned, output) == (0, "draining\n")
    assert f"{number.name}: stopping (once more kills)" in log


def test_a_node_that_is_to_outlive_its_terminal_does_also_while_it_drains():
    drains = """
    import os
    async def main(stop):
        await until_stopped(stop)
        os.kill(os.getpid(), signal.SIGHUP)
        print("kept", flush=True)
    """
    with node(drains, hang_up="SIG_IGN") as process:  # as nohup starts it
        ready(process)
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        returned, output, log = end_of(process)
    assert (returned, output) == (0, "draining\nkept\n")
    assert "SIGTERM: stopping" in log
    assert "SIGHUP" not in log


@pytest.mark.parametrize(
    ("first", "second", "before"),
    [
        (signal.SIGTERM, signal.SIGTERM, ANY_IS_A_SECOND_ONE),
        (signal.SIGTERM, signal.SIGINT, ANY_IS_A_SECOND_ONE),
        (signal.SIGINT, signal.SIGTERM, ANY_IS_A_SECOND_ONE),
        (signal.SIGINT, signal.SIGINT, ANY_IS_A_SECOND_ONE),
        (signal.SIGINT, signal.SIGTERM, ""),  # another one is a second one at once
    ],
)
def test_a_second_signal_kills_a_node_that_does_not_drain(first, second, before):
    with node(before + HANGS) as process:
        ready(process)
        process.send_signal(first)
        assert process.stdout.readline() == "draining\n"
        process.send_signal(second)
        assert end_of(process)[0] == -second


@STOPPING
def test_the_same_signal_again_within_a_second_is_the_same_request(number):
    drains = """
    async def main(stop):
        await until_stopped(stop)
        await asyncio.to_thread(sys.stdin.readline)
        print("kept", flush=True)
    """
    with node("signals.SAME_REQUEST_S = 60.0\n" + textwrap.dedent(drains)) as process:
        ready(process)
        process.send_signal(number)
        assert process.stdout.readline() == "draining\n"
        process.send_signal(number)
        process.stdin.write("go on\n")
        process.stdin.flush()
        assert end_of(process)[:2] == (0, "kept\n")


def test_two_signals_at_once_are_one_request():
    both = """
    import threading
    async def main(stop):
        signal.pthread_sigmask(signal.SIG_BLOCK, signals._SIGNALS)
        for number in signals._SIGNALS:
            signal.pthread_kill(threading.get_ident(), number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals._SIGNALS)
        await stop.wait()
        print("ended", flush=True)
    """
    with node(both) as process:
        returned, output, log = end_of(process)
    assert (returned, output) == (0, "ended\n")
    assert len(log.splitlines()) == 1
    assert "stopping (once more kills)" in log


def test_what_nobody_can_catch_is_still_said():
    bug = """
    class Bug:
        def __del__(self):
            raise OSError("a bug")

    async def main(stop):
        Bug()
    """
    with node(bug) as process:
        returned, _, log = end_of(process)
    assert returned == 0
    assert "OSError: a bug" in log


def test_a_node_that_ends_at_once_is_not_killed_by_the_same_signal_again():
    """As `timeout` sends it: to its child, and to the group that the child is in."""
    stops = """
    import atexit, os
    from dase_grpc import __main__
    from dase_grpc.cli import main as cli

    async def main(stop):
        os.kill(os.getpid(), signal.SIGTERM)
        await stop.wait()

    def command():
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        code = run_node("tester", main, stdin_is_leash=False)
        os.kill(os.getpid(), signal.SIGTERM)
        atexit.register(os.kill, os.getpid(), signal.SIGTERM)
        sys.exit(code)

    cli.main = command
    __main__.run()
    """
    with node(stops) as process:
        assert end_of(process)[0] == 0


def test_running_a_node_restores_the_signals(caplog, monkeypatch):
    monkeypatch.setattr(signals, "SAME_REQUEST_S", 0.0)
    caplog.set_level(logging.INFO, "dase")
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]

    async def main(stop):
        os.kill(os.getpid(), signal.SIGTERM)
        await stop.wait()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL

    assert run_node("tester", main, stdin_is_leash=False) == 0
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    assert "SIGTERM: stopping" in caplog.text


def test_a_halt_event_is_set_by_a_signal_and_gives_the_handlers_back(monkeypatch):
    monkeypatch.setattr(signals, "SAME_REQUEST_S", 0.0)
    before = signal.getsignal(signal.SIGTERM)
    with halt_event() as halt:
        assert not halt.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
        assert halt.wait(PATIENCE_S)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_had_a_signal_before_a_halt_event_has_it_again_once_the_same_again_is_over(monkeypatch):
    came = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        with halt_event():
            os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert came == []
        monkeypatch.setattr(signals, "SAME_REQUEST_S", 0.0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert came == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


# -- the first process of a container ------------------------------------------------------------------

FIRST_OF_A_CONTAINER = """
import os, signal
from dase_grpc.process import lifecycle, signals

signals.INIT_PID = os.getpid()
signals.SAME_REQUEST_S = 0.0
signals._raise_for = lambda handler, number: None  # as the kernel, which keeps it from such a process
signals.end_as_init()
{then}
"""
TWICE = """
with lifecycle.halt_event():
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
"""


@pytest.mark.parametrize(
    ("then", "number"),
    [
        pytest.param("os.kill(os.getpid(), signal.SIGTERM)", signal.SIGTERM, id="while it loads"),
        pytest.param(TWICE, signal.SIGINT, id="by a second signal"),
    ],
)
def test_the_first_process_of_a_container_ends_by_a_signal(then, number):
    with python(FIRST_OF_A_CONTAINER.format(then=then)) as process:
        assert end_of(process) == (128 + number, "", "")


def test_another_process_takes_sigterm_as_it_was():
    before = signal.getsignal(signal.SIGTERM)
    signals.end_as_init()
    assert signal.getsignal(signal.SIGTERM) is before


# -- what an environment forks ------------------------------------------------------------------------

FORKS = """
import multiprocessing, os, time

def work(pipe):
    pipe.send("working")
    time.sleep(600)

def until_it_ends(number):
    ours, theirs = multiprocessing.Pipe()
    worker = multiprocessing.get_context("fork").Process(target=work, args=(theirs,))
    worker.start()
    ours.recv()
    os.kill(worker.pid, number)
    worker.join()
    return worker.exitcode

async def main(stop):
    print(await asyncio.to_thread(until_it_ends, signal.SIGTERM), stop.is_set(), flush=True)
"""


def test_a_signal_to_a_worker_that_was_forked_ends_the_worker_and_not_the_node():
    with node(FORKS) as process:
        assert end_of(process) == (0, "-15 False\n", "")


@contextmanager
def exit_code(expected):
    """True in a fork, which is to end with this code, and False in its parent, where it does."""
    child = os.fork()
    yield child == 0
    if child == 0:
        os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == expected


def test_a_worker_that_was_forked_heeds_signals_as_it_chooses():
    with halt_event() as halt:
        with exit_code(0) as forked:
            if forked:
                os._exit(int(signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL))
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        assert not halt.is_set()


@pytest.mark.parametrize(
    ("same_request_s", "twice", "code"), [(60.0, False, 0), (60.0, True, 0), (0.0, True, -signal.SIGINT)]
)
def test_a_worker_lives_on_after_the_first_ctrl_c_which_its_parent_gets_too_and_not_after_the_second(
    same_request_s, twice, code
):
    before = signal.getsignal(signal.SIGINT)
    with halt_event(), exit_code(code) as forked:
        if forked:
            signals.SAME_REQUEST_S = same_request_s
            for _ in range(1 + twice):
                os.kill(os.getpid(), signal.SIGINT)
            os._exit(0)
    with exit_code(0) as forked:
        if forked:
            os._exit(int(signal.getsignal(signal.SIGINT) is not before))


def test_a_call_that_ended_while_it_was_answered_is_no_news_but_a_servicers_bug_is():
    main = """
    import logging

    async def main(stop):
        grpc = logging.getLogger("grpc._cython.cygrpc")
        for trouble in (
            "ExecuteBatchError raised in core by servicer method [/dase.v1.ReplayService/Sample]",
            "Unexpected [KeyError] raised by servicer method [/dase.v1.ReplayService/Sample]",
        ):
            try:
                raise KeyError(trouble)
            except KeyError:
                grpc.exception(trouble)
        try:
            raise asyncio.CancelledError
        except asyncio.CancelledError:
            grpc.exception("a call that a stopping server gave up")
    """
    with node(main) as process:
        _, _, log = end_of(process)
    assert "ExecuteBatchError" not in log
    assert "gave up" not in log
    assert "Unexpected [KeyError] raised by servicer method" in log
    assert log.count("Traceback") == 1
