"""An environment that does not return before, at the start or at the end of a run ends the process."""

import threading

import pytest
import worlds
from patience import PATIENCE_S
from small import new_run, small_config

from dase_grpc.launch import checks
from dase_grpc.launch.checks import end_hanging, probed
from dase_grpc.launch.lockstep import open_lockstep
from dase_grpc.learning.envs import probe, restarting


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


@pytest.fixture
def ended(monkeypatch):
    """The exit codes with which this process would have ended; then the environment is let go on."""
    codes, release = [], threading.Event()

    def end(code):
        codes.append(code)
        release.set()

    monkeypatch.setattr(checks, "end_now", end)
    codes_and_release = (codes, release)
    return codes_and_release


def stuck(monkeypatch, module, call, release):
    monkeypatch.setattr(module, "make_env", lambda *_: Stuck(call, release))
    return small_config("worlds:ConstantReward", env__timeout_s=0.3)


@pytest.mark.parametrize("call", ["making", "reset", "step", "close"])
def test_an_environment_that_hangs_when_it_is_tried_out_ends_the_process(monkeypatch, ended, capsys, call):
    codes, release = ended
    probed(stuck(monkeypatch, probe, call, release).env)
    assert codes == [1]
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith(f"error: the environment's {call} has not returned since ")
    assert "(trying it out before the run), longer than env.timeout_s = 0.3" in told


@pytest.mark.parametrize("call", ["making", "close"])
def test_in_lockstep_it_is_watched_from_its_making_to_its_closing(tmp_path, monkeypatch, ended, capsys, call):
    codes, release = ended
    config = stuck(monkeypatch, restarting, call, release)
    with open_lockstep(config, new_run(tmp_path, config), on_hang=end_hanging):
        assert codes == ([1] if call == "making" else [])
    assert codes == [1]
    assert f"error: the environment's {call} has not returned since " in capsys.readouterr().err
