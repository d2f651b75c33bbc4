"""What ids stand for, and how those that stand for nothing are refused."""

import warnings

import gymnasium
import pytest
import worlds  # noqa: F401  # it registers environments

from dase_grpc.errors import EnvironmentSpecError
from dase_grpc.learning.env_ids import latest_version, resolve_id, summary
from dase_grpc.learning.envs import make_env


def refusal(env_id: str) -> str:
    with pytest.raises(EnvironmentSpecError) as caught:
        resolve_id(env_id)
    return str(caught.value)


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise ValueError


def test_an_error_that_cannot_be_shown_is_summed_up_all_the_same() -> None:
    said = "UnspeakableError: <UnspeakableError that cannot be shown>"
    assert summary(UnspeakableError()) == said


def test_an_id_without_a_version_gets_the_latest() -> None:
    assert resolve_id("HalfCheetah") == "HalfCheetah-v5"
    assert resolve_id("VersionedWorld") == "VersionedWorld-v10"
    assert resolve_id("worlds:VersionedWorld") == "worlds:VersionedWorld-v10"
    assert latest_version("phys2d/CartPole") == "phys2d/CartPole-v1"


@pytest.mark.parametrize("env_id", ["HalfCheetah-v5", "VersionedWorld-v2", "worlds:PointGoal", "my_env:Cart"])
def test_any_other_id_stays_as_it_is(env_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend("examples")
    assert resolve_id(env_id) == env_id


def test_a_resolved_or_old_id_is_noted_once_and_gymnasium_keeps_quiet(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in (1, 2):
        spec = gymnasium.envs.registration.EnvSpec(f"NotedWorld-v{version}", entry_point="worlds:PointGoal")
        monkeypatch.setitem(gymnasium.registry, spec.id, spec)
    for _ in range(2):
        make_env("NotedWorld", {}).close()
        make_env("NotedWorld-v1", {}).close()
    assert caplog.messages == [
        "NotedWorld has no version; taking the latest, NotedWorld-v2",
        "NotedWorld-v1 is an old version; the latest is NotedWorld-v2",
    ]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("env_id", "latest"), [("HalfCheetah-v3", "HalfCheetah-v5"), ("NeedyWorld-v1", "NeedyWorld-v2")]
)
def test_an_old_version_that_needs_what_is_missing_names_the_latest(env_id: str, latest: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(EnvironmentSpecError, match=f"so use {latest}"):
            make_env(env_id, {})


@pytest.mark.parametrize(
    ("env_id", "remedy"),
    [
        ("my_package/my_module.py:MyEnv", "write my_package.my_module:MyEnv"),
        ("./my_module.py:MyEnv", "write my_module:MyEnv"),
        ("/home/me/my_module.py:MyEnv", "write my_module:MyEnv"),
        ("my_package\\my_module.py:MyEnv", "write my_package.my_module:MyEnv"),
        ("my_package/my_module:MyEnv", "write my_package.my_module:MyEnv"),
        ("my_module.py", "write my_module:MyEnv"),
    ],
)
def test_a_path_is_refused_with_the_name_of_its_module(env_id: str, remedy: str) -> None:
    assert remedy in refusal(env_id)


def test_only_environments_and_functions_of_the_module_itself_are_suggested() -> None:
    assert "did you mean 'limited'?" in refusal("worlds:limitd")
    assert "did you mean 'Clock'?" in refusal("worlds:clok")
    for name in ("GoalPolic", "Dicrete", "not_callabel", "Any", "cheetah"):
        assert "did you mean" not in refusal(f"worlds:{name}X")
