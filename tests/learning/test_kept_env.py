"""What an environment does to its process: it finds it again, and nobody else sees it."""

import gc
import logging
import os
import sys
import warnings

import meddling
import numpy as np
import pytest
import torch
from meddling import FOUND_AGAIN, LEFT, PUT_BACK, Meddles, module_that, put_back, settings

from dase_grpc.learning.envs.make import make_env
from dase_grpc.process import settings as process_settings
from dase_grpc.process.containment import SURROUNDINGS, given_variables

ACTION = np.zeros(1, np.float32)
CALLS = ("constructor", "reset", "step", "close")


def theirs():
    """What an environment sees of the process."""
    return {name: setting.read() for name, setting in process_settings.settings().items()}


@pytest.fixture(autouse=True)
def process(monkeypatch, tmp_path):
    """The process as it is, in a folder of its own, and put back in any case."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(Meddles, "look", staticmethod(theirs))
    with put_back():
        yield settings()


def live(when, *deeds):
    """One life of an environment; what it saw, and what there was before it and after each call."""
    after = {"before": settings()}
    env = make_env("meddling:Meddles", {"when": when, "deeds": deeds})
    after["constructor"] = settings()
    env.reset(seed=1)
    after["reset"] = settings()
    for _ in range(3):
        env.step(ACTION)
    after["step"] = settings()
    env.close()
    after["close"] = settings()
    return env.unwrapped.seen, after


@pytest.mark.parametrize("deed", [*FOUND_AGAIN, *PUT_BACK])
@pytest.mark.parametrize("when", CALLS)
def test_the_process_is_as_before_after_each_call_whatever_the_environment_did_in_it(process, when, deed):
    _, after = live(when, deed)
    assert after == dict.fromkeys(("before", *CALLS), after["before"])


@pytest.mark.parametrize("deed", [*FOUND_AGAIN, *PUT_BACK])
def test_the_process_is_as_before_after_an_import(process, tmp_path, deed):
    (tmp_path / "meddles_on_import.py").write_text(module_that(deed))
    before = settings()
    make_env("meddles_on_import:Meddles", {}).close()
    assert settings() == before


@pytest.mark.parametrize("deed", FOUND_AGAIN)
def test_an_environment_finds_what_it_has_set_at_each_later_call(process, deed):
    seen, _ = live("constructor", deed)
    ours = {name: process[name] for name in seen["constructor"]}
    assert seen["constructor"] != ours
    assert seen["reset"] == seen["step"] == seen["close"] == seen["constructor"]


@pytest.mark.parametrize("deed", FOUND_AGAIN)
def test_an_environment_finds_what_its_import_has_set_in_each_copy(process, tmp_path, deed):
    (tmp_path / "meddles_on_import.py").write_text(module_that(deed))
    copies = [make_env("meddles_on_import:Meddles", {}) for _ in range(2)]
    seen = [env.unwrapped.seen["constructor"] for env in copies]
    assert seen[0] == seen[1] != {name: process[name] for name in seen[0]}


def test_what_an_environment_puts_back_itself_is_as_before_in_its_later_calls(process):
    env = make_env("meddling:Meddles", {"when": "constructor", "deeds": ("computes in float64",)})
    env.unwrapped._when = "reset"
    meddling_back = {"computes in float32": lambda: torch.set_default_dtype(torch.float32)}
    meddling.DEEDS.update(meddling_back)
    env.unwrapped._deeds = (*meddling_back,)
    env.reset(seed=1)
    env.step(ACTION)
    assert env.unwrapped.seen["step"]["default dtype"] is torch.float32
    assert not SURROUNDINGS.theirs


def test_each_copy_is_made_where_the_first_was_although_that_one_has_moved(tmp_path, monkeypatch):
    (tmp_path / "assets").mkdir()
    monkeypatch.setitem(meddling.DEEDS, "enters its folder", lambda: os.chdir("assets"))
    copies = [
        make_env("meddling:Meddles", {"when": "constructor", "deeds": ("enters its folder",)}) for _ in "12"
    ]
    assert {env.unwrapped.seen["constructor"]["folder"] for env in copies} == {str(tmp_path / "assets")}


def test_variables_stay_for_the_process_and_are_known_as_they_were_given(monkeypatch):
    name = "CHANGED_BY_AN_ENVIRONMENT"
    monkeypatch.setenv(name, "noted, so that it is gone afterwards")
    for given in (None, "no"):
        monkeypatch.delenv(name, raising=False) if given is None else monkeypatch.setenv(name, given)
        make_env("meddling:Meddles", {"when": "constructor", "deeds": ("sets a variable",)}).close()
        assert os.environ[name] == "yes"
        assert given_variables().get(name) == given
        monkeypatch.setenv(name, "otherwise")  # by somebody else, who may mean it
        assert given_variables()[name] == "otherwise"


def test_a_higher_recursion_limit_and_a_handler_of_its_own_stay(process):
    class Adds(logging.Handler):
        pass

    handler, limit = Adds(), sys.getrecursionlimit()
    meddling.DEEDS["adds"] = lambda: (sys.setrecursionlimit(limit + 1), logging.root.addHandler(handler))
    try:
        live("constructor", "adds")
        assert sys.getrecursionlimit() == limit + 1
        assert handler in logging.root.handlers
    finally:
        sys.setrecursionlimit(limit)
        logging.root.removeHandler(handler)
        del meddling.DEEDS["adds"]


def test_a_warning_that_an_environment_wants_as_an_error_for_itself_stays_one(process):
    meddling.DEEDS["insists"] = lambda: warnings.filterwarnings("error", module="simulator")
    live("constructor", "insists")
    assert warnings.filters[0][0] == "error"
    del meddling.DEEDS["insists"]


def test_a_step_that_changes_nothing_is_the_environment_s_own_call_alone(monkeypatch):
    env = make_env("meddling:Meddles", {})
    env.reset(seed=1)
    env.step(ACTION)
    monkeypatch.setattr(SURROUNDINGS, "as_before", None)
    monkeypatch.setattr(SURROUNDINGS, "entered", None)
    env.step(ACTION)


def test_what_is_left_is_listed():
    assert gc.isenabled()
    assert not {*LEFT} & {*FOUND_AGAIN, *PUT_BACK}
