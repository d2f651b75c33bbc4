"""The tree of errors: drawn once, complete, and told apart by who has to act."""

import inspect
import re

import pytest

from dase_grpc import errors
from dase_grpc.errors import DaseError

CLASSES = {
    name: cls for name, cls in vars(errors).items() if inspect.isclass(cls) and issubclass(cls, DaseError)
}
LINE = re.compile(r"(?P<branches>(?:[│ ]   )*)[├└]── (?P<names>[\w, ]+)")


def drawn_parents() -> dict[str, str]:
    """The parent of each class as the tree in the module's docstring draws it."""
    parents, path = {}, ["DaseError"]
    for line in filter(None, map(LINE.match, (errors.__doc__ or "").splitlines())):
        depth, names = len(line["branches"]) // 4 + 1, line["names"].split(", ")
        path[depth:] = [names[-1]]
        parents |= dict.fromkeys(names, path[depth - 1])
    return parents


def test_the_tree_in_the_docstring_names_every_class_under_its_parent():
    parents = {name: cls.__bases__[0].__name__ for name, cls in CLASSES.items() if cls is not DaseError}
    assert drawn_parents() == parents


def test_the_tree_is_drawn_in_the_order_of_the_code():
    assert ["DaseError", *drawn_parents()] == list(CLASSES)


@pytest.mark.parametrize("cls", CLASSES.values())
def test_every_error_is_ours_explains_itself_and_carries_its_sentence(cls):
    assert issubclass(cls, DaseError)
    assert cls.__doc__
    assert str(cls("what, value, limit, remedy")) == "what, value, limit, remedy"


def test_users_nodes_networks_and_services_are_different_things_to_blame():
    branches = DaseError.__subclasses__()
    assert {branch.__name__ for branch in branches} == {
        *("UsageError", "NodeFailedError", "DivergedError", "WaitedTooLongError", "RefusalError"),
        *("EnvironmentFailedError", "EnvironmentHangsError", "SchedulerError"),
    }
    for cls in CLASSES.values():
        assert sum(issubclass(cls, branch) for branch in branches) == (cls is not DaseError)


@pytest.mark.parametrize(
    ("cls", "code"),
    [
        (errors.ConfigError, 2),
        (errors.DataDirectoryError, 2),
        (errors.RunDirectoryError, 2),
        (errors.DiskFullError, 4),
        (errors.StaleLeaseError, 3),
        (errors.RunMismatchError, 3),
        (errors.CapacityError, 3),
        (errors.UnreachableError, 1),
        (errors.AgentTakenError, 1),
        (errors.NodeFailedError, 1),
        (errors.DivergedError, 1),
    ],
)
def test_the_exit_code_says_whether_starting_again_could_help(cls, code):
    assert cls("x").exit_code == code
    assert (code in errors.LASTING_CODES) == (code > 1)
