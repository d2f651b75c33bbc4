"""Ids of environments: a version of Gymnasium's, or a class or function of a module."""

import difflib
import functools
import importlib.metadata
import inspect
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Final

import gymnasium

from dase_grpc.config.resolve import RunConfig
from dase_grpc.errors import EnvironmentSpecError
from dase_grpc.learning.envs.answers import kind
from dase_grpc.learning.envs.imports import module_of, module_remedy, names_file

_CUTOFF_IN_MODULE: Final = 0.75
"""How alike (difflib's ratio) a module's name must be to be suggested; most are no environments."""

_CUTOFF_FOR_TYPOS: Final = 0.8
"""How alike an id must be to be taken for what was meant, before what another package may have."""

_SHOWN: Final = 6
"""How many environments of a module are named."""

_VERSION: Final = re.compile(r"-v(\d+)$")

_log = logging.getLogger(__name__)


def with_resolved_id(config: RunConfig) -> RunConfig:
    """The configuration with its environment's id resolved, so that files and schemas name the version.

    Raises:
        EnvironmentSpecError: see `resolve_id`.
    """
    env = config.env.model_copy(update={"id": resolve_id(config.env.id)})
    return config.model_copy(update={"env": env})


def resolve_id(env_id: str) -> str:
    """The id with its version: of a Gymnasium id without one, the latest; any other as it is.

    Logs one note per process where the id has changed or an older version is asked for. Of
    `package.module:Name` the module is imported; the current directory joins `sys.path` for that.

    Raises:
        EnvironmentSpecError: there is nothing of that name, or the module cannot be imported.
    """
    module_name, colon, name = env_id.rpartition(":")
    if names_file(env_id):
        raise EnvironmentSpecError(module_remedy(env_id, what="environment", name="MyEnv"))
    if colon and factory_of(env_id) is not None:
        return env_id
    latest = latest_version(name)
    if name in gymnasium.registry:
        if latest is not None and latest != name:
            _note(f"{name} is an old version; the latest is {latest}")
        return env_id
    if latest is None or _VERSION.search(name):  # Gymnasium would first warn, then refuse
        raise EnvironmentSpecError(_unknown(env_id, name))
    _note(f"{name} has no version; taking the latest, {latest}")
    return f"{module_name}{colon}{latest}"


def latest_version(name: str) -> str | None:
    """The registered id of the same name with the highest version; None if there is no such name."""
    base = _VERSION.sub("", name)
    versions = ((_VERSION.search(key), key) for key in gymnasium.registry if _VERSION.sub("", key) == base)
    found = {int(version[1]): key for version, key in versions if version}
    return found[max(found)] if found else None


def factory_of(env_id: str) -> Callable[..., object] | None:
    """What `package.module:Name` names; None for an id without a module or one that its module registers.

    Raises:
        EnvironmentSpecError: the module cannot be imported, or has nothing callable of that name.
    """
    module_name, colon, name = env_id.rpartition(":")
    if not colon:
        return None
    module = module_of(env_id, what="environment", error=EnvironmentSpecError)
    factory = getattr(module, name, None)
    if factory is None:
        if name in gymnasium.registry or (latest_version(name) and not _VERSION.search(name)):
            return None
        offered = [*_environments(module), *_functions(module), *gymnasium.registry]
        raise EnvironmentSpecError(
            f"the module {module_name!r} neither has {name!r} nor registers an environment of that name"
            f"; {_told(module)}{_nearest(name, offered, cutoff=_CUTOFF_IN_MODULE)}"
        )
    if isinstance(factory, gymnasium.Env) or not callable(factory):
        raise EnvironmentSpecError(
            f"{env_id!r} is {kind(factory)}, so name a class or a function that returns a new gymnasium.Env"
        )
    return factory  # type: ignore[no-any-return]  # any callable of the user's


def continuous_variant(env_id: str) -> str | None:
    """The registered id of the same environment with continuous actions, where that is another one.

    Gymnasium names it so: LunarLander-v3 and LunarLanderContinuous-v3.
    """
    name = env_id.rpartition(":")[2]
    return latest_version(f"{_VERSION.sub('', name)}Continuous") if name in gymnasium.registry else None


def _unknown(env_id: str, name: str) -> str:
    """What is said of an id that nothing has registered; if it looks like no typing error, packages first."""
    said, own = f"there is no environment {env_id!r}", "your own as package.module:Class"
    if near := _nearest(name, gymnasium.registry, cutoff=_CUTOFF_FOR_TYPOS, within=True):
        return f"{said}{near} (write another package's as package:Name-v0, {own})"
    packages, here = _environment_packages(), ""
    if len(packages) == 1:
        here = f", such as {packages[0]}:{name}"
    elif packages:
        here = f" (installed: {_listed(packages)})"
    far = _nearest(name, gymnasium.registry)
    return f"{said}; write another package's as package:Name-v0{here}, {own}{far}"


def _environment_packages() -> list[str]:
    """The modules of other installed packages that need Gymnasium, and so may bring environments."""
    found: set[str] = set()
    for package in importlib.metadata.distributions():
        needs = {re.split(r"[^\w.-]", need, maxsplit=1)[0].lower() for need in package.requires or ()}
        if "gymnasium" in needs and package.name not in ("gymnasium", "dase-grpc"):
            files = package.files or ()
            tops = {file.parts[0] for file in files if len(file.parts) == 2 and file.name == "__init__.py"}
            found |= {top for top in tops if top.isidentifier()}
    return sorted(found)


def _told(module: ModuleType) -> str:
    """The environments of a module, or else its functions, in words."""
    registered = [key for key, spec in gymnasium.registry.items() if _within(module, _home(spec.entry_point))]
    if found := [*_environments(module), *registered]:
        return f"it has {_listed(found)}"
    found = [name for name in _functions(module) if not name.startswith("_")]
    said = "it defines no environment"
    return f"{said}, but these functions: {_listed(found)}" if found else said


def _listed(found: Sequence[str]) -> str:
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(found[:_SHOWN]) + more


def _environments(module: ModuleType) -> list[str]:
    """The names of the classes of environments that a module defines."""
    return [
        name
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, gymnasium.Env) and _within(module, value.__module__)
    ]


def _functions(module: ModuleType) -> list[str]:
    """The names of what else can be called and is defined in a module, classes left out."""
    return [
        name
        for name, value in vars(module).items()
        if callable(value) and not inspect.isclass(value) and _within(module, _home(value))
    ]


def _home(value: object) -> str:
    """The module of a function, or of an entry point, which may be a text."""
    return value.partition(":")[0] if isinstance(value, str) else str(getattr(value, "__module__", ""))


def _within(module: ModuleType, home: str) -> bool:
    return f"{home}.".startswith(f"{module.__name__}.")


def _nearest(
    name: str, candidates: Iterable[str], *, cutoff: float | None = None, within: bool = False
) -> str:
    """The candidate that is most like a name, in words; `within` takes a longer one that contains it too."""
    known = {candidate.lower(): candidate for candidate in candidates if not candidate.startswith("_")}
    wanted = name.lower()
    matches = difflib.get_close_matches(wanted, known, n=1, cutoff=cutoff or 0.6)
    if not matches and (within or cutoff is None) and len(wanted) > 2:
        matches = sorted((key for key in known if wanted in key), reverse=True)
    return f"; did you mean {_newest(known[matches[0]], known.values())!r}?" if matches else ""


def _newest(name: str, candidates: Iterable[str]) -> str:
    """The latest version of an environment among the candidates, which are ids; other names as they are."""
    base = name.rpartition("-v")[0]
    split = {each: each.rpartition("-v") for each in candidates}
    found = {int(tail): each for each, (head, _, tail) in split.items() if head == base and tail.isdecimal()}
    return found[max(found)] if base and found else name


@functools.cache
def _note(sentence: str) -> None:
    _log.warning("%s", sentence)
