"""What an environment does to the process while it is made is put right afterwards."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import gymnasium
import pytest

from dase_grpc.learning.envs.make import make_env
from dase_grpc.process.containment import _put_back, left_as_found, process_kept
from dase_grpc.process.settings import Setting
from dase_grpc.process.signals import heeding


class SetsHandlers(gymnasium.Wrapper):
    """Takes over signals and closes stdin, as simulators that are programs of their own do."""

    def __init__(self):
        super().__init__(gymnasium.make("Pendulum-v1"))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        os.close(0)


@pytest.fixture
def stdin():
    """Descriptor 0 of something, whatever the tests were started with."""
    reading, writing = os.pipe()
    before = os.dup(0)
    os.dup2(reading, 0)
    yield os.fstat(0)
    os.dup2(before, 0)
    for descriptor in (reading, writing, before):
        os.close(descriptor)


def test_handlers_and_streams_are_as_before_once_an_environment_is_made(stdin):
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGCHLD)]
    env = make_env(f"{__name__}:SetsHandlers", {})
    env.close()
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGCHLD)] == before
    assert os.fstat(0) == stdin


def test_what_is_open_already_is_left_alone(stdin):
    replaced, _ = pipe = os.pipe()
    with process_kept():
        os.dup2(replaced, 0)  # a stream that the environment has sent elsewhere on purpose
    assert os.path.sameopenfile(0, replaced)
    for descriptor in pipe:
        os.close(descriptor)


def test_no_descriptor_is_left_open(stdin):
    before = os.listdir("/proc/self/fd")
    with process_kept():
        pass
    assert os.listdir("/proc/self/fd") == before


def test_other_threads_have_no_handlers_to_put_back(stdin):
    def run():
        with process_kept():
            os.close(0)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(run).result()
    assert os.fstat(0) == stdin


@pytest.fixture
def handlers():
    """Handlers of the signals that stop a process, put back in any case."""
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    yield before
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_same_signal_again_ends_nothing_after_a_run_that_is_left_as_it_was_found(handlers):
    with left_as_found(), heeding(lambda number: None):
        signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)


def test_what_a_first_signal_has_set_stays_after_an_environment_is_made(handlers):
    """A second one of another kind kills, also where a call hangs that Python cannot interrupt."""
    with heeding(lambda number: None):
        with process_kept():
            signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL


def test_what_an_environment_sets_does_not_stay(handlers):
    with heeding(lambda number: None):
        heeded = signal.getsignal(signal.SIGTERM)
        with process_kept():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        assert signal.getsignal(signal.SIGTERM) is heeded


def test_a_setting_that_another_one_changes_when_it_is_put_back_is_put_back_after_it():
    """As torch's gradients, which are on or off by the inference mode, whoever has set that."""
    now = {"mode": False, "gradients": False}

    def set_mode(on):
        now.update(mode=on, gradients=not on)

    known = {
        "mode": Setting(lambda: now["mode"], set_mode),
        "gradients": Setting(lambda: now["gradients"], lambda on: now.update(gradients=on)),
    }
    with _put_back(known) as changed:
        now["mode"] = True
    assert now == {"mode": False, "gradients": False}
    assert changed == ["mode", "gradients"]
