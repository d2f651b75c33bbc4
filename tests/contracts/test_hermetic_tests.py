"""A test depends on itself alone: not on the folder it is started from, nor on how busy the machine is."""

import ast
import tomllib
from collections import Counter
from pathlib import Path

import pytest
from patience import PATIENCE_S

PROJECT = Path(__file__).resolve().parents[2]
TESTS = PROJECT / "tests"
LIMITS = {"timeout", "within_s"}
WAITS = {"timeout", "wait", "communicate"}


def numbers(call: ast.Call) -> list[float]:
    """The seconds, written as a number, after which a call gives up; tenths are for what does not come."""
    called = getattr(call.func, "attr", getattr(call.func, "id", ""))
    given = [each.value for each in call.keywords if each.arg in LIMITS]
    if called in WAITS and len(call.args) == 1:
        given += call.args
    values = [each.value for each in given if isinstance(each, ast.Constant)]
    return [value for value in values if isinstance(value, int | float) and 1 <= value < PATIENCE_S]


@pytest.mark.parametrize("time", ["one test", "the next"])
def test_each_test_works_in_a_folder_where_nothing_lies(time):
    here = Path.cwd()
    assert list(here.iterdir()) == []
    assert PROJECT not in here.parents
    Path("left").write_text(time)


def test_no_two_modules_of_tests_share_a_name_by_which_pytest_would_mix_them_up():
    times = Counter(path.name for path in TESTS.rglob("test_*.py"))
    assert [name for name, count in times.items() if count > 1] == []


def test_what_tests_wait_for_has_the_time_that_only_the_dead_need():
    found = [
        f"{path.relative_to(TESTS)}:{node.lineno} waits {number:g} s; take patience.PATIENCE_S"
        for path in sorted(TESTS.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        for number in numbers(node)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("process.wait(20)", [20]),
        ("process.communicate(timeout=5)", [5]),
        ("asyncio.timeout(8.0)", [8]),
        ("promptly(task, within_s=3)", [3]),
        ("pytest.mark.timeout(1_800)", []),
        ("process.wait(PATIENCE_S)", []),
        ("process.wait(timeout=0.3)", []),
        ("', '.join(names)", []),
    ],
)
def test_a_number_of_seconds_is_found_where_it_limits_a_wait(code, found):
    assert numbers(ast.parse(code, mode="eval").body) == found


def test_a_test_has_longer_than_one_wait_in_it():
    options = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]
    assert options["ini_options"]["timeout"] >= 2 * PATIENCE_S
