"""What ids stand for, and how those that stand for nothing are refused."""

import importlib
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import gymnasium
import pytest
import worlds  # noqa: F401  # it registers environments

from dase_grpc.errors import EnvironmentSpecError
from dase_grpc.learning.envs.answers import summary
from dase_grpc.learning.envs.ids import continuous_variant, latest_version, resolve_id
from dase_grpc.learning.envs.make import make_env

EXAMPLES = Path(__file__).parents[3] / "examples"


def refusal(env_id: str) -> str:
    with pytest.raises(EnvironmentSpecError) as caught:
        resolve_id(env_id)
    return str(caught.value)


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise ValueError


def test_an_error_that_cannot_be_shown_is_summed_up_all_the_same():
    said = "UnspeakableError: <UnspeakableError that cannot be shown>"
    assert summary(UnspeakableError()) == said


def test_an_id_without_a_version_gets_the_latest():
    assert resolve_id("HalfCheetah") == "HalfCheetah-v5"
    assert resolve_id("VersionedWorld") == "VersionedWorld-v10"
    assert resolve_id("worlds:VersionedWorld") == "worlds:VersionedWorld-v10"
    assert latest_version("phys2d/CartPole") == "phys2d/CartPole-v1"


@pytest.mark.parametrize("env_id", ["HalfCheetah-v5", "VersionedWorld-v2", "worlds:PointGoal", "my_env:Cart"])
def test_any_other_id_stays_as_it_is(env_id: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    assert resolve_id(env_id) == env_id


def test_a_resolved_or_old_id_is_noted_once_and_gymnasium_keeps_quiet(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
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
def test_an_old_version_that_needs_what_is_missing_names_the_latest(env_id: str, latest: str):
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
def test_a_path_is_refused_with_the_name_of_its_module(env_id: str, remedy: str):
    assert remedy in refusal(env_id)


def test_only_environments_and_functions_of_the_module_itself_are_suggested():
    assert "did you mean 'limited'?" in refusal("worlds:limitd")
    assert "did you mean 'Clock'?" in refusal("worlds:clok")
    assert "; it has PointGoal," in refusal("worlds:clok")
    for name in ("GoalPolic", "Dicrete", "not_callabel", "Any", "cheetah"):
        assert "did you mean" not in refusal(f"worlds:{name}X")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], str]:
    """Makes a module of the user's and returns what is said of an environment that it lacks."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def lacking(text: str) -> str:
        (tmp_path / "mine.py").write_text(f"import gymnasium\n{text}")
        monkeypatch.delitem(sys.modules, "mine", raising=False)
        importlib.invalidate_caches()
        return refusal("mine:Nothing-v0")

    return lacking


def test_the_environments_of_a_module_are_named_where_it_lacks_the_one_that_is_asked_for(module):
    classes = "\n".join(f"class World{index}(gymnasium.Env): pass" for index in range(8))
    assert module(classes).endswith("; it has World0, World1, World2, World3, World4, World5 and 2 more")
    assert module("class Plain: pass\n").endswith("; it defines no environment")
    assert module("def made(): ...\ndef _own(): ...\n").endswith(
        "; it defines no environment, but these functions: made"
    )


def test_the_ids_that_a_module_registers_are_named_too(
    module: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
):
    for name in ("MineByText-v0", "MineByClass-v3"):
        monkeypatch.delitem(gymnasium.registry, name, raising=False)
    text = module(
        "class Own(gymnasium.Env): pass\n"
        "gymnasium.register('MineByText-v0', 'mine:Own')\n"
        "gymnasium.register('MineByClass-v3', Own)\n"
    )
    for name in ("MineByText-v0", "MineByClass-v3"):
        gymnasium.registry.pop(name)
    assert text.endswith("; it has Own, MineByText-v0, MineByClass-v3")


def test_the_continuous_variant_of_an_environment_is_known_by_its_name():
    assert continuous_variant("LunarLander-v3") == "LunarLanderContinuous-v3"
    assert continuous_variant("MountainCar-v0") == "MountainCarContinuous-v0"
    for name in ("LunarLanderContinuous-v3", "CartPole-v1", "worlds:DiscreteAction"):
        assert continuous_variant(name) is None


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, str], None]:
    """Installs packages that need something; nothing else is installed."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])

    def install(name: str, needs: str):
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: {needs}\n"
        (folder / "METADATA").write_text(metadata)
        (folder / "RECORD").write_text(f"{name}/__init__.py,,\n{name}/inner/__init__.py,,\n")

    return install


def test_an_id_of_another_package_is_told_how_to_write_it_before_what_it_is_a_little_like(installed):
    installed("robots", "gymnasium>=1.0")
    installed("unrelated", "numpy")
    assert refusal("FetchReach-v4") == (
        "there is no environment 'FetchReach-v4'; write another package's as package:Name-v0, such as "
        "robots:FetchReach-v4, your own as package.module:Class; did you mean 'Reacher-v5'?"
    )
    installed("mazes", "Gymnasium")
    assert "package:Name-v0 (installed: mazes, robots), your own as" in refusal("FetchReach-v4")


def test_a_typing_error_is_told_what_was_meant_first(installed: Callable[[str, str], None]):
    installed("robots", "gymnasium")
    assert refusal("Pendulm-v1") == (
        "there is no environment 'Pendulm-v1'; did you mean 'Pendulum-v1'? (write another package's as "
        "package:Name-v0, your own as package.module:Class)"
    )


def test_a_module_that_leaves_the_process_is_refused(module: Callable[[str], str]):
    assert "failed with SystemExit, that is, sys.exit(4) (mine.py, line 2)" in module("raise SystemExit(4)\n")
