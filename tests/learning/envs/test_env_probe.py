"""Trying an environment out before a run."""

import breaches
import pytest
import worlds

from dase_grpc.config.sections import EnvConfig
from dase_grpc.errors import USAGE_CODE, EnvironmentSpecError
from dase_grpc.learning.envs.make import TryOut, probe, schema_of, tried_out, try_out
from dase_grpc.process.watchdog import Watch


def outcome(env_id: str, **kwargs: object) -> TryOut:
    return try_out(EnvConfig(id=env_id, kwargs=kwargs), Watch("a test"))


def refusal(env_id: str, **kwargs: object) -> str:
    with pytest.raises(EnvironmentSpecError) as caught:
        tried_out(EnvConfig(id=env_id, kwargs=kwargs), Watch("a test"))
    assert caught.value.exit_code == USAGE_CODE
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert len(sentence) <= 300
    return sentence


@pytest.mark.parametrize(
    "name", ["PointGoal", "DictObservation", "PictureObservation", "MatrixAction", "IntegerAction", "limited"]
)
def test_a_good_environment_passes(name: str):
    result = outcome(f"worlds:{name}")
    assert (result.findings, result.notes) == ((), ())
    assert result.schema == tried_out(EnvConfig(id=f"worlds:{name}"), Watch("a test"))


def test_the_seed_reaches_the_environment_and_the_action_is_the_middle_one():
    env = worlds.EndpointAction()
    assert probe(env, schema_of(env, "a world"), Watch("a test"), seed=6) == ((), ())
    assert env.seeds == [6]
    assert [action.tolist() for action in env.actions] == [[0, 0.5, 0.5]]


def test_a_reset_without_a_seed_or_options_is_told_gymnasiums_interface():
    for env_id, lacking in (("worlds:OldReset", "seed"), ("breaches:NoOptions", "options")):
        assert refusal(env_id) == (
            f"the environment's reset does not take {lacking}, but in Gymnasium's interface "
            "reset(self, *, seed=None, options=None) returns (observation, info)"
        )


@pytest.mark.parametrize(
    ("how", "said"), [(how, said) for how, (_, said) in {**breaches.STEPS, **breaches.RESETS}.items()]
)
def test_a_step_or_a_reset_that_returns_something_else_is_refused(how, said):
    assert said in refusal("breaches:Breaks", how=how)


@pytest.mark.parametrize("how", breaches.OBSERVATIONS)
def test_an_observation_outside_its_space_is_refused_and_its_component_named(how: str):
    sentence = refusal("breaches:Observes", how=how)
    assert breaches.OBSERVATIONS[how][2] in sentence
    assert sentence.endswith(", so it is not of its space; correct the environment's reset and step")


@pytest.mark.parametrize("how", breaches.UNFLATTENABLE)
def test_an_observation_space_that_is_no_numbers_is_refused_and_its_component_named(how: str):
    sentence = refusal("breaches:Observes", how=how)
    assert breaches.UNFLATTENABLE[how][1] in sentence
    assert "FilterObservation" in sentence


@pytest.mark.parametrize("where", ["making", "reset", "step"])
@pytest.mark.parametrize("how", breaches.RAISES)
def test_what_an_environment_raises_is_one_sentence_whose_traceback_is_logged_if_it_says_too_little(
    how: str, where: str, caplog: pytest.LogCaptureFixture
):
    said = breaches.RAISES[how][1]
    assert said in refusal("breaches:Raises", how=how, where=where)
    assert (f"in _{how}" in caplog.text) == (where != "making" or said.endswith("line "))


@pytest.mark.parametrize("how", breaches.RAISES)
def test_an_environment_that_fails_to_close_passes_and_that_is_logged(
    how: str, caplog: pytest.LogCaptureFixture
):
    assert outcome("breaches:Raises", how=how, where="close").findings == ()
    said = f"closing the environment failed with {breaches.RAISES[how][1]}"
    assert [said in message for message in caplog.messages] == [True]


def test_an_environment_that_is_refused_and_fails_to_close_is_refused_for_its_own_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(worlds.DiscreteAction, "close", lambda self: 1 / 0)
    assert "Discrete(3)" in refusal("worlds:DiscreteAction")
    assert "closing the environment failed with ZeroDivisionError" in caplog.text


@pytest.mark.parametrize(("call", "kwargs"), [("reset", {}), ("step", {"old_step": True})])
def test_other_tuples_are_seen_behind_a_wrapper_that_takes_them_apart_too(call: str, kwargs: dict[str, bool]):
    said = f"the environment's {call} returned another number of values than in Gymnasium's interface"
    assert refusal("worlds:OldReturns", nested=True, **kwargs).startswith(said)


def test_spaces_that_cannot_be_asked_for_or_change_are_refused():
    assert "has no observation_space, for asking for it failed with IndexError" in refusal(
        "breaches:HiddenSpace"
    )
    assert "changed its spaces in reset or step (action_low: (-1.0,) before, (-2.0,) after)" in refusal(
        "breaches:ChangesItsSpaces"
    )


def test_all_findings_are_listed_not_only_the_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(worlds.Endless, "reset", lambda self, **_: (None, None))
    monkeypatch.setattr(worlds.Endless, "step", lambda self, action: (None, None, None, None, None))
    found = [str(finding) for finding in outcome("worlds:Endless").findings]
    words = ["observation", "info", "observation", "reward", "terminated", "truncated", "info"]
    assert [word in sentence for word, sentence in zip(words, found, strict=True)] == [True] * 7


def test_numbers_that_are_not_finite_are_noted_and_not_refused(caplog: pytest.LogCaptureFixture):
    schema = tried_out(EnvConfig(id="breaches:NotFinite"), Watch("a test"))
    assert schema.observation_size == 2
    assert caplog.messages == [
        "note: the environment's first step returned an observation that is not finite in float32",
        "note: the environment's first step returned a reward that is not finite",
    ]
