"""Shape of the house: rooms one can know, modules that are more than a paragraph, names used once.

Each rule lists its exceptions with the reason; a list only shrinks.
"""

import ast
from collections import Counter, defaultdict
from collections.abc import Iterable

from contracts.source import imports, modules, sources

MODULES_IN_A_ROOM = 25
LINES_OF_A_PARAGRAPH = 100

ROOT = {"__main__", "api", "errors", "pace", "progress", "schema", "seeding", "testing"}
"""The nouns that every room may use, the public interface, what tests of users import, and the process."""

PARAGRAPHS = {
    "cli.certs": "commands of their own, below `dase certs`",
    "learning.agents.ddpg": "an algorithm, beside td3 and sac",
    "learning.agents.ensemble": "a policy, beside that of one agent",
}
"""Modules of fewer lines than a module takes, which one other imports."""

TWO_SIDES = {
    "cluster": {"replay.client.cluster", "replay.service.cluster", "launch.drill.cluster"},
    "directory": {"replay.buffer.directory", "runs.directory"},
    "insert": {"replay.client.insert", "replay.service.insert"},
    "learner": {"learning.training.learner", "nodes.learner"},
    "policies": {"replay.buffer.policies", "replay.client.policies", "replay.service.policies"},
    "sample": {"replay.client.sample", "replay.service.sample"},
    "streams": {"replay.client.streams", "replay.service.streams"},
    "priorities": {"replay.buffer.priorities", "replay.client.priorities"},
}
"""File names that are used more than once: the ends or the sides of one thing."""

GERUNDS = {
    "sampling": "the field's word",
    "seeding": "the field's word",
    "sharding": "the field's word",
    "training": "the field's word",
    "learning": "the field's word",
    "testing": "as NumPy and torch name what tests of users import",
}
"""Names of modules and rooms that say what is done, not what is there."""

ASYNCIO = (
    "process",
    "replay.client",
    "replay.service",
    "replay.security",
    "replay.wire.addresses",  # asks the resolver
    "inference",
    "observe",
    "nodes",
    "launch",
)
"""Where there are streams or processes."""


def inner(names: Iterable[str]) -> list[str]:
    """Names of modules without the package's own."""
    return sorted(name.removeprefix("dase_grpc.") for name in names if name != "dase_grpc")


def rooms() -> set[str]:
    return {name.rpartition(".")[0] for name in modules() if "." in name}


def files() -> list[str]:
    """The modules that are no `__init__`."""
    return inner(set(modules()) - rooms())


def test_a_room_holds_no_more_than_one_can_know():
    sizes = Counter(name.rpartition(".")[0] for name in modules())
    assert {room: size for room, size in sizes.items() if size > MODULES_IN_A_ROOM} == {}


def test_only_the_nouns_stand_outside_the_rooms():
    assert {name for name in files() if "." not in name} == ROOT


def test_a_paragraph_of_one_module_is_no_module():
    importers = {
        name: [other for other in modules() if f"dase_grpc.{name}" in imports(other)] for name in files()
    }
    lines = {name: len(sources()[f"dase_grpc.{name}"].splitlines()) for name in files()}
    short = {name for name in files() if len(importers[name]) == 1 and lines[name] < LINES_OF_A_PARAGRAPH}
    assert short == set(PARAGRAPHS)


def test_a_file_name_is_used_twice_only_for_the_sides_of_one_thing():
    places = defaultdict(set)
    for name in files():
        places[name.rpartition(".")[2]].add(name)
    assert {name: found for name, found in places.items() if len(found) > 1} == TWO_SIDES


def test_a_class_name_is_used_once():
    found = Counter(
        node.name for tree in modules().values() for node in tree.body if isinstance(node, ast.ClassDef)
    )
    assert [name for name, times in found.items() if times > 1 and not name.startswith("_")] == []


def test_names_of_files_and_rooms_are_nouns():
    parts = {part for name in inner(modules()) for part in name.split(".")}
    assert {part for part in parts if part.endswith("ing") and part != "ring"} == set(GERUNDS)


def test_asyncio_stays_in_the_rooms_where_there_are_streams_or_processes():
    strangers = [
        name
        for name in files()
        if "asyncio" in imports(f"dase_grpc.{name}")
        and not any(name == room or name.startswith(f"{room}.") for room in ASYNCIO)
    ]
    assert strangers == []
