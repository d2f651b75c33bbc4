"""A process on a leash ends with its launcher."""

import signal
import subprocess
import threading

import pytest
from children import end_of, let_go, until_ended
from patience import PATIENCE_S
from process.programs import HANGS, SHORT_LEASH, WAITS, loading, node, program, ready

from dase_grpc.process.signals import end_with_launcher

CLOSES_STDIN = """
async def main(stop):
    import os
    os.close(0)
    await until_stopped(stop)
"""


@pytest.mark.parametrize("main", [WAITS, CLOSES_STDIN])
def test_a_node_whose_leash_is_let_go_stops_and_exits_0_whatever_it_did_to_its_stdin(main):
    with node(main, leash=True) as process:
        ready(process)
        let_go(process)
        returned, output, log = end_of(process)
    assert (returned, output) == (0, "draining\n")
    assert "the launcher is gone: stopping" in log


@pytest.mark.parametrize("draining_before", [False, True])
def test_a_node_that_does_not_end_after_its_launcher_kills_itself_also_if_it_was_draining(draining_before):
    with node(SHORT_LEASH + HANGS, leash=True) as process:
        ready(process)
        if draining_before:
            process.send_signal(signal.SIGTERM)
            assert process.stdout.readline() == "draining\n"
        let_go(process)
        returned, _, log = end_of(process)
    assert returned == -signal.SIGKILL
    assert "did not end within 0.3 s of its launcher" in log


def test_a_node_that_ends_by_itself_does_not_say_that_its_launcher_is_gone():
    with node("async def main(stop): print('done', flush=True)", leash=True) as process:
        process.wait(timeout=PATIENCE_S)  # before anybody lets go of the leash
        assert end_of(process) == (0, "done\n", "")


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
        let_go(process)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.3)
        process.send_signal(signal.SIGTERM)
        assert end_of(process)[0] == 0


def test_a_program_without_a_loop_whose_leash_is_let_go_halts():
    with program() as process:
        process.stdin.write("hello\n" * 100)  # says nothing
        let_go(process)
        assert end_of(process)[:2] == (0, "ended\n")


def test_a_program_without_a_loop_that_ends_lets_its_leash_be():
    with program("pass", after="sys.exit(3)") as process:
        assert process.stdout.readline() == "ended\n"
        assert process.wait(timeout=PATIENCE_S) == 3  # before anybody lets go of the leash


def test_a_program_without_a_loop_that_does_not_halt_kills_itself():
    with program("threading.Event().wait()", leashless_s=0.3) as process:
        let_go(process)
        returned, _, log = end_of(process)
    assert returned == -signal.SIGKILL
    assert "did not end within 0.3 s of its launcher" in log


def test_a_program_without_a_loop_heeds_signals_on_a_leash_too():
    with program() as process:
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "ended\n"
        assert process.wait(timeout=PATIENCE_S) == 0


def test_a_process_that_is_still_loading_ends_at_once_with_all_it_has_started():
    then = """
    import subprocess
    print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
    time.sleep(600)
    """
    with loading(then) as process:
        started = int(process.stdout.readline())
        process.stdin.write("hello\n" * 100)  # says nothing
        let_go(process)
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
        let_go(process)
        assert end_of(process)[:2] == (0, "kept\n")


def test_a_process_without_a_leash_loads_on_without_its_launcher():
    threads = threading.active_count()
    end_with_launcher(stdin_is_leash=False)
    assert threading.active_count() == threads
