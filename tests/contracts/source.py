"""The package's own source as syntax trees, for tests about how it is written."""

import ast
import tomllib
from functools import cache
from pathlib import Path

import dase_grpc

ROOT = Path(dase_grpc.__file__).parent
PROJECT = ROOT.parent
VERSION: str = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
GENERATED = ("dase_grpc.replay.wire.v1", "dase_grpc.inference.v1")


@cache
def sources() -> dict[str, str]:
    """The text of every module written by hand, by its dotted name."""
    named = {_name(path): path for path in sorted(ROOT.rglob("*.py"))}
    return {
        name: path.read_text(encoding="utf-8")
        for name, path in named.items()
        if not name.startswith(GENERATED)
    }


@cache
def modules() -> dict[str, ast.Module]:
    """The syntax tree of every module written by hand, by its dotted name."""
    return {name: ast.parse(text) for name, text in sources().items()}


@cache
def imports(module: str) -> frozenset[str]:
    """Every dotted name that a module imports anywhere, `from x import y` as both x and x.y."""
    names: set[str] = set()
    for node in ast.walk(modules()[module]):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(names)


def importers(library: str) -> set[str]:
    """The modules that import a library, or a part of it, by themselves."""
    return {name for name in modules() if any(used.split(".")[0] == library for used in imports(name))}


def reached_from(start: str) -> set[str]:
    """The modules of the package that importing `start` brings in sooner or later, itself included."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        name = waiting.pop()
        if name in modules() and name not in found:
            found.add(name)
            waiting += [*imports(name), name.rpartition(".")[0]]
    return found


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
