"""A node's process: exit codes, signals, the leash, and what stands in its log."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
from contextlib import contextmanager

import pytest
from children import until_ended
from patience import PATIENCE_S

from dase_grpc.errors import AddressError, ConfigError, DaseError, DrainingError, UnreachableError
from dase_grpc.process import signals
from dase_grpc.process.leash import end_with_launcher
from dase_grpc.process.lifecycle import halt_event, run_node
from dase_grpc.process.tasks import first_cause

PROGRAM = """
import asyncio, signal, sys
from dase_grpc.errors import *
from dase_grpc.process import signals
from dase_grpc.process.lifecycle import run_node

async def until_stopped(stop):
    print("ready", flush=True)
    await stop.wait()
    print("draining", flush=True)

{main}

signal.signal(signal.SIGHUP, signal.{hang_up})
sys.exit(run_node("tester", main, stdin_is_leash={leash}))
"""
WAITS = "main = until_stopped"
ANY_IS_A_SECOND_ONE = "signals.SAME_REQUEST_S = 0.0\n"
HANGS = """
async def main(stop):
    await until_stopped(stop)
    await asyncio.Event().wait()
"""


@contextmanager
def node(main=WAITS, *, leash=False, hang_up="SIG_DFL"):
    """A process that runs `main` as a node; `hang_up` is how whoever starts it has it take SIGHUP."""
    program = PROGRAM.format(main=textwrap.dedent(main), leash=leash, hang_up=hang_up)
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ready(process):
    assert process.stdout.readline() == "ready\n"


def end_of(process):
    """Its exit code, and what it still wrote."""
    output, log = process.communicate(timeout=PATIENCE_S)
    return process.returncode, output, log


def test_a_node_that_is_done_exits_0():
    with node("async def main(stop): pass") as process:
        assert end_of(process) == (0, "", "")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        ("DrainingError", 1),
        ("UnreachableError", 1),
        ("DaseError", 1),
        ("ConfigError", 2),
        ("AddressError", 2),
        ("EnvironmentSpecError", 2),
    ],
)
def test_an_error_of_ours_is_one_line_in_the_log_and_a_code(error, code):
    with node(f"async def main(stop): raise {error}('it is so; do that')") as process:
        returned, _, log = end_of(process)
    assert returned == code
    assert log.endswith("tester | error: it is so; do that\n")
    assert len(log.splitlines()) == 1


def test_errors_of_ours_in_nested_groups_are_one_line_too():
    main = """
    async def fail(error):
        raise error

    async def main(stop):
        async with asyncio.TaskGroup() as outer:
            async def inner():
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(fail(ConfigError("a setting")))
            outer.create_task(inner())
    """
    with node(main) as process:
        returned, _, log = end_of(process)
    assert returned == 2
    assert log.endswith("error: a setting\n")
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


def test_a_bug_keeps_its_traceback_and_exits_1():
    with node("async def main(stop): return 1 / 0") as process:
        returned, _, log = end_of(process)
    assert returned == 1
    assert "in main" in log
    assert log.endswith("ZeroDivisionError: division by zero\n")


def test_a_bug_beside_refusals_is_what_the_traceback_shows():
    main = """
    async def refuse():
        raise DrainingError("over")

    async def fail():
        return 1 / 0

    async def main(stop):
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(refuse())
            tasks.create_task(fail())
    """
    with node(main) as process:
        returned, _, log = end_of(process)
    assert returned == 1
    assert log.endswith("ZeroDivisionError: division by zero\n")
    assert "in fail" in log


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


def test_a_node_that_is_to_outlive_its_terminal_does():
    with node(hang_up="SIG_IGN") as process:  # as nohup starts it
        ready(process)
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        returned, output, log = end_of(process)
    assert (returned, output) == (0, "draining\n")
    assert "SIGTERM: stopping" in log
    assert "SIGHUP" not in log


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_second_signal_kills_a_node_that_does_not_drain(first, second):
    with node(ANY_IS_A_SECOND_ONE + textwrap.dedent(HANGS)) as process:
        ready(process)
        process.send_signal(first)
        assert process.stdout.readline() == "draining\n"
        process.send_signal(second)
        assert end_of(process)[0] == -second


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
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


def test_another_signal_is_a_second_request_at_once():
    with node(HANGS) as process:
        ready(process)
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "draining\n"
        process.send_signal(signal.SIGTERM)
        assert end_of(process)[0] == -signal.SIGTERM


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


def test_a_node_that_is_to_outlive_its_terminal_does_so_while_it_drains_too():
    drains = """
    import os
    async def main(stop):
        await until_stopped(stop)
        os.kill(os.getpid(), signal.SIGHUP)
        print("kept", flush=True)
    """
    with node(drains, hang_up="SIG_IGN") as process:
        ready(process)
        process.send_signal(signal.SIGTERM)
        assert end_of(process)[:2] == (0, "draining\nkept\n")


def test_a_node_whose_leash_is_let_go_stops_and_exits_0():
    with node(leash=True) as process:
        ready(process)
        process.stdin.close()
        process.stdin = None
        returned, output, log = end_of(process)
    assert (returned, output) == (0, "draining\n")
    assert "the launcher is gone: stopping" in log


def test_a_node_that_does_not_end_after_its_launcher_kills_itself():
    hangs = "from dase_grpc.process import leash\nleash.LEASHLESS_S = 0.3\n" + textwrap.dedent(HANGS)
    with node(hangs, leash=True) as process:
        ready(process)
        process.stdin.close()
        process.stdin = None
        returned, _, log = end_of(process)
    assert returned == -signal.SIGKILL
    assert "did not end within 0.3 s of its launcher" in log


def test_a_node_that_is_draining_when_its_launcher_dies_has_no_longer_for_it():
    hangs = "from dase_grpc.process import leash\nleash.LEASHLESS_S = 0.3\n" + textwrap.dedent(HANGS)
    with node(hangs, leash=True) as process:
        ready(process)
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "draining\n"
        process.stdin.close()
        process.stdin = None
        returned, _, log = end_of(process)
    assert returned == -signal.SIGKILL
    assert "did not end within 0.3 s of its launcher" in log


def test_a_node_that_ends_by_itself_does_not_say_that_its_launcher_is_gone():
    with node("async def main(stop): print('done', flush=True)", leash=True) as process:
        process.wait(timeout=PATIENCE_S)  # before anybody lets go of the leash
        assert end_of(process) == (0, "done\n", "")


def test_a_node_whose_stdin_is_closed_by_what_it_runs_keeps_its_leash():
    closes = """
        async def main(stop):
            import os
            os.close(0)
            await until_stopped(stop)
    """
    with node(closes, leash=True) as process:
        ready(process)
        process.stdin.close()
        process.stdin = None
        returned, output, log = end_of(process)
    assert (returned, output) == (0, "draining\n")
    assert "the launcher is gone: stopping" in log


def test_what_is_written_into_a_leash_does_not_stop_the_node():
    with node(leash=True) as process:
        ready(process)
        process.stdin.write("hello\n" * 100)
        process.stdin.flush()
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=PATIENCE_S)  # before anybody lets go of the leash
        returned, _, log = end_of(process)
    assert returned == 0
    assert "launcher is gone" not in log


def test_a_node_without_a_leash_does_not_mind_the_end_of_stdin():
    with node() as process:
        ready(process)
        process.stdin.close()
        process.stdin = None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.3)
        process.send_signal(signal.SIGTERM)
        assert end_of(process)[0] == 0


def test_running_a_node_restores_the_signals(caplog, monkeypatch):
    monkeypatch.setattr("dase_grpc.process.signals.SAME_REQUEST_S", 0.0)
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
    monkeypatch.setattr("dase_grpc.process.signals.SAME_REQUEST_S", 0.0)
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
        monkeypatch.setattr("dase_grpc.process.signals.SAME_REQUEST_S", 0.0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert came == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


PROGRAM_WITHOUT_A_LOOP = """
import sys, threading
from dase_grpc.process import leash, lifecycle

leash.LEASHLESS_S = {leashless_s}
with lifecycle.halt_event(stdin_is_leash=True) as halt:
    print("ready", flush=True)
    {main}
print("ended", flush=True)
{after}
"""


@contextmanager
def program(main="halt.wait()", after="", leashless_s=600):
    """A process without an event loop that is on a leash, once it is ready."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            PROGRAM_WITHOUT_A_LOOP.format(main=main, after=after, leashless_s=leashless_s),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        ready(process)
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_program_without_a_loop_whose_leash_is_let_go_halts():
    with program() as process:
        process.stdin.write("hello\n" * 100)  # says nothing
        process.stdin.close()
        process.stdin = None
        returned, output, _ = end_of(process)
    assert returned == 0
    assert output == "ended\n"


def test_a_program_without_a_loop_that_ends_lets_its_leash_be():
    with program("pass", after="sys.exit(3)") as process:
        assert process.stdout.readline() == "ended\n"
        assert process.wait(timeout=PATIENCE_S) == 3  # before anybody lets go of the leash


def test_a_program_without_a_loop_that_does_not_halt_kills_itself():
    with program("threading.Event().wait()", leashless_s=0.3) as process:
        process.stdin.close()
        process.stdin = None
        returned, _, log = end_of(process)
    assert returned == -signal.SIGKILL
    assert "did not end within 0.3 s of its launcher" in log


def test_a_program_without_a_loop_heeds_signals_on_a_leash_too():
    with program() as process:
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "ended\n"
        assert process.wait(timeout=PATIENCE_S) == 0


# -- before there is anything to keep -----------------------------------------------------------------

LOADS_FIRST = """
import sys, time
from dase_grpc.process.leash import end_with_launcher
from dase_grpc.process.lifecycle import halt_event

end_with_launcher(stdin_is_leash=True)
print("ready", flush=True)
{then}
"""


@contextmanager
def loading(then):
    process = subprocess.Popen(
        [sys.executable, "-c", LOADS_FIRST.format(then=textwrap.dedent(then))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        ready(process)
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_process_that_is_still_loading_ends_at_once_with_all_it_has_started():
    then = """
    import subprocess
    print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
    time.sleep(600)
    """
    with loading(then) as process:
        started = int(process.stdout.readline())
        process.stdin.write("hello\n" * 100)  # says nothing
        process.stdin.close()
        process.stdin = None
        assert process.wait(timeout=PATIENCE_S) == 1
        until_ended(started)


def test_a_process_that_has_something_to_keep_by_then_is_let_keep_it():
    then = """
    with halt_event(stdin_is_leash=True) as halt:
        print("training", flush=True)
        halt.wait()
        print("kept", flush=True)
    """
    with loading(then) as process:
        assert process.stdout.readline() == "training\n"
        process.stdin.close()
        process.stdin = None
        assert end_of(process)[:2] == (0, "kept\n")


def test_a_process_without_a_leash_loads_on_without_its_launcher():
    threads = threading.active_count()
    end_with_launcher(stdin_is_leash=False)
    assert threading.active_count() == threads


# -- what an environment forks ------------------------------------------------------------------------

FORKS = """
import multiprocessing, signal, time

def work(pipe):
    {working}
    pipe.send("working")
    time.sleep(600)

def until_it_ends(numbers):
    ours, theirs = multiprocessing.Pipe()
    worker = multiprocessing.get_context("fork").Process(target=work, args=(theirs,))
    worker.start()
    ours.recv()
    for number in numbers:
        os.kill(worker.pid, number)
    worker.join()
    return worker.exitcode
"""

IN_A_LOOP = f"""
import os
{FORKS.format(working="pass")}

async def main(stop):
    print(await asyncio.to_thread(until_it_ends, [signal.{{number}}]), stop.is_set(), flush=True)
"""


def test_a_signal_to_a_worker_that_was_forked_ends_the_worker_and_not_the_node():
    with node(IN_A_LOOP.replace("{number}", "SIGTERM")) as process:
        assert end_of(process) == (0, "-15 False\n", "")


def test_a_worker_that_was_forked_heeds_signals_as_it_chooses():
    with halt_event() as halt:
        child = os.fork()
        if child == 0:
            os._exit(int(signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL))
        assert os.waitpid(child, 0) == (child, 0)
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        assert not halt.is_set()


@pytest.mark.parametrize(
    ("same_request_s", "twice", "exit_code"), [(60.0, False, 0), (60.0, True, 0), (0.0, True, -signal.SIGINT)]
)
def test_a_worker_lives_on_after_the_first_ctrl_c_which_its_parent_gets_too_and_not_after_the_second(
    same_request_s, twice, exit_code
):
    before = signal.getsignal(signal.SIGINT)
    with halt_event():
        child = os.fork()
        if child == 0:
            signals.SAME_REQUEST_S = same_request_s
            for _ in range(1 + twice):
                os.kill(os.getpid(), signal.SIGINT)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == exit_code
    child = os.fork()
    if child == 0:
        os._exit(int(signal.getsignal(signal.SIGINT) is not before))
    assert os.waitpid(child, 0) == (child, 0)


REFUSALS = [DrainingError("a"), UnreachableError("b")]
BUG, OTHER_BUG = ZeroDivisionError("c"), KeyError("d")


@pytest.mark.parametrize(
    ("errors", "shown"),
    [
        ([REFUSALS[0]], REFUSALS[0]),
        (REFUSALS, REFUSALS[0]),
        ([ExceptionGroup("", [REFUSALS[1]]), REFUSALS[0]], REFUSALS[1]),
        ([BUG], BUG),
        ([REFUSALS[0], BUG], BUG),
        ([ExceptionGroup("", [REFUSALS[0], ExceptionGroup("", [BUG])])], BUG),
    ],
)
def test_of_a_group_its_bug_is_shown_and_else_its_first_refusal(errors, shown):
    with pytest.raises(type(shown)) as caught, first_cause():
        raise ExceptionGroup("several", errors)
    assert caught.value is shown


def test_a_group_with_two_bugs_is_shown_as_it_is():
    group = ExceptionGroup("several", [REFUSALS[0], BUG, OTHER_BUG])
    with pytest.raises(ExceptionGroup) as caught, first_cause():
        raise group
    assert caught.value is group


@pytest.mark.parametrize("error", [ConfigError("x"), KeyError("y"), AddressError("z"), DaseError("d")])
def test_an_error_that_is_no_group_passes_through(error):
    with pytest.raises(type(error)) as caught, first_cause():
        raise error
    assert caught.value is error


async def test_a_cancellation_passes_through():
    async def main():
        with first_cause():
            await asyncio.Event().wait()

    task = asyncio.ensure_future(main())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


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
        print("ready", flush=True)
    """
    with node(main) as process:
        _, log = process.communicate(timeout=PATIENCE_S)
    assert "ExecuteBatchError" not in log
    assert "gave up" not in log
    assert "Unexpected [KeyError] raised by servicer method" in log
    assert log.count("Traceback") == 1
