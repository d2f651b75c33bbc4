"""A call into an environment that does not return is noticed and said, and ends the process around a run."""

import logging
import threading
from contextlib import closing

import pytest
import worlds
from contracts.sentences import assert_one_sentence
from patience import PATIENCE_S
from small import new_run, small_config

from dase_grpc.launch import checks
from dase_grpc.launch.checks import end_hanging, probed
from dase_grpc.launch.lockstep import open_lockstep
from dase_grpc.learning.envs import make, restarts
from dase_grpc.learning.envs.restarts import WatchedEnv
from dase_grpc.process import watchdog as module
from dase_grpc.process.watchdog import SAY_AFTER_S, Watch, say_where, watchdog


class Stuck(worlds.ConstantReward):
    """Its `call` does not return before `release` is set."""

    def __init__(self, call, release):
        self.call, self.release = call, release
        self.wait_in("making")
        super().__init__()

    def reset(self, **options):
        self.wait_in("reset")
        return super().reset(**options)

    def step(self, action):
        self.wait_in("step")
        return super().step(action)

    def close(self):
        self.wait_in("close")
        super().close()

    def wait_in(self, call):
        if call == self.call:
            assert self.release.wait(PATIENCE_S)


def live(make, watch):
    with closing(WatchedEnv(make, watch)) as env:
        env.reset(seed=0)
        env.step([0.0])


@pytest.mark.parametrize("call", ["reset", "step", "making"])
def test_a_call_that_does_not_return_is_said_once_with_its_place_in_the_code(call, caplog):
    watch, release, alarms, alarm = Watch("agent 3"), threading.Event(), [], threading.Event()

    def on_hang(found, error):
        say_where(found)
        alarms.append(error)
        alarm.set()

    with watchdog([Watch("agent 2"), watch], timeout_s=0.05, on_hang=on_hang):
        thread = threading.Thread(target=live, args=(lambda: Stuck(call, release), watch))
        thread.start()
        assert alarm.wait(PATIENCE_S)
        release.set()
        thread.join(PATIENCE_S)
    (error,) = alarms
    assert_one_sentence(
        error,
        f"the environment's {call} has not returned since ",
        "(agent 3)",
        "longer than env.timeout_s = 0.05",
        "the last checkpoint, if there is one, is kept",
    )
    assert error.exit_code == 1
    assert "agent 3 hangs here" in caplog.text
    assert "in wait_in" in caplog.text
    assert watch.call is None


def test_calls_that_return_are_never_too_long_together():
    watch, alarms = Watch("agent 0"), []
    looked, followed = threading.Semaphore(0), threading.Semaphore(0)

    class Looking(Watch):
        """Says each time it is looked at; what is seen then is over by the next time."""

        @property
        def call(self):
            seen = watch.call
            looked.release()
            assert followed.acquire(timeout=PATIENCE_S)
            return seen

        @call.setter
        def call(self, value):
            pass

    with watchdog([Looking("agent 0")], timeout_s=0.04, on_hang=lambda *found: alarms.append(found)):
        watch.begin("step")
        for _ in range(20):
            assert looked.acquire(timeout=PATIENCE_S)
            watch.end()
            watch.begin("step")
            followed.release()
        watch.end()
        followed.release(20)
    assert alarms == []


def test_time_in_which_the_process_does_not_run_does_not_count(monkeypatch):
    """As after SIGSTOP and SIGCONT: the clock jumps between two looks."""
    watch, alarms, times, over = Watch("agent 0"), [], iter([0.0, 1000.0, 2000.0, 3000.0]), Rounds(3)
    watch.call = ("step", 0.0)
    monkeypatch.setattr(module.time, "monotonic", lambda: next(times))
    module._look([watch], 100.0, lambda *found: alarms.append(found), over)
    assert alarms == []


class Rounds(threading.Event):
    """An event that is set after some waits, which return at once."""

    def __init__(self, count):
        super().__init__()
        self._left = count

    def wait(self, timeout=None):
        self._left -= 1
        return self._left < 0


def test_0_is_never():
    threads = threading.active_count()
    with watchdog([Watch("agent 0")], timeout_s=0, on_hang=lambda *found: None):
        assert threading.active_count() == threads


def test_a_long_call_is_what_a_learner_waits_for():
    watch = Watch("agent 0")
    assert watch.waiting is None
    watch.begin("step")
    assert watch.waiting is None
    what, since = watch.call
    watch.call = (what, since - SAY_AFTER_S - 1)
    assert watch.waiting == "the environment's step to return (6 s so far)"
    watch.end()
    assert watch.waiting is None


def test_an_environment_that_hangs_is_not_closed_by_another_thread():
    made = worlds.Clock()
    env = WatchedEnv(lambda: made, Watch("agent 0"))
    env.watch.begin("step")
    env.close()
    assert made.closed == 0
    env.watch.end()
    env.close()
    assert made.closed == 1


def test_where_nobody_calls_there_is_nothing_to_say(caplog):
    caplog.set_level(logging.INFO)
    say_where(Watch("agent 0"))
    assert caplog.text == ""


# -- before, at the start and at the end of a run -----------------------------------------------------


@pytest.fixture
def stuck(monkeypatch):
    """Has a module make environments that hang in a call; gives a configuration, and the exit codes.

    Once this process would have ended, the environment is let go on.
    """
    codes, release = [], threading.Event()

    def end(code):
        codes.append(code)
        release.set()

    def made_in(place, call):
        monkeypatch.setattr(place, "make_env", lambda *_: Stuck(call, release))
        return small_config("worlds:ConstantReward", env__timeout_s=0.3), codes

    monkeypatch.setattr(checks, "end_now", end)
    return made_in


@pytest.mark.slow
@pytest.mark.parametrize("call", ["making", "reset", "step", "close"])
def test_an_environment_that_hangs_when_it_is_tried_out_ends_the_process(stuck, capsys, call):
    config, codes = stuck(make, call)
    probed(config.env)
    assert codes == [1]
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith(f"error: the environment's {call} has not returned since ")
    assert "(trying it out before the run), longer than env.timeout_s = 0.3" in told


@pytest.mark.parametrize("call", ["making", "close"])
def test_in_lockstep_it_is_watched_from_its_making_to_its_closing(tmp_path, stuck, capsys, call):
    config, codes = stuck(restarts, call)
    with open_lockstep(config, new_run(tmp_path, config), on_hang=end_hanging):
        assert codes == ([1] if call == "making" else [])
    assert codes == [1]
    assert f"error: the environment's {call} has not returned since " in capsys.readouterr().err
