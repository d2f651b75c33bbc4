"""Imports of a user's code by its path, `package.module:Name`, each failure a sentence."""

import importlib
import sys
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

from dase_grpc.errors import UsageError
from dase_grpc.learning.envs.answers import RAISED, summary
from dase_grpc.process.containment import kept_call


def named(path: str, *, what: str, wanted: str, example: str, error: type[UsageError]) -> Any:
    """What `package.module:Name` names, where it is neither an environment nor a file.

    `what` says in messages what the path names, "measure" for one, `wanted` what to name, and `example` how
    one may be called.

    Raises:
        UsageError: of the type `error`: the path is a file's, or there is nothing of that name.
    """
    if names_file(path):
        raise error(module_remedy(path, what=what, name=example))
    module, name = module_of(path, what=what, error=error), path.rpartition(":")[2]
    found = getattr(module, name, None)
    if found is None:
        raise error(f"the module {module.__name__!r} has no {what} {name!r}; name {wanted}")
    return found


def module_of(path: str, *, what: str, error: type[UsageError]) -> ModuleType:
    """The module of `package.module:Name`; the current directory joins `sys.path` for that.

    `what` says in messages what the path names, "environment" for one.

    Raises:
        UsageError: of the type `error`: there is no such module, or it cannot be imported.
    """
    module_name, here = path.rpartition(":")[0], str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    if module_name in sys.modules:
        return importlib.import_module(module_name)
    try:
        with kept_call("import"):
            return importlib.import_module(module_name)
    except ModuleNotFoundError as missing:
        if missing.name and f"{module_name}.".startswith(f"{missing.name}."):
            raise error(
                f"there is no module {missing.name!r} for the {what} {path!r}, so run in the folder "
                f"that holds it ({here} does not) or install its package"
            ) from missing
        raise error(
            f"the module {module_name!r} of the {what} {path!r} needs {missing.name!r}, "
            f"which is not installed, so install it"
        ) from missing
    except RAISED as raised:
        raise error(
            f"importing {module_name!r} for the {what} {path!r} failed with {summary(raised)}"
        ) from raised


def names_file(path: str) -> bool:
    """Whether a path names a file instead of a module."""
    module_name, _, name = path.rpartition(":")
    return "/" in module_name or "\\" in module_name or f"{module_name or name}".endswith(".py")


def module_remedy(path: str, *, what: str, name: str) -> str:
    """What to write instead of a path that names a file; `name` where it names nothing in it."""
    file, colon, given = path.rpartition(":")
    parts = PurePosixPath((file or given).replace("\\", "/").removesuffix(".py")).parts
    module = ".".join(parts) if all(part.isidentifier() for part in parts) else parts[-1]
    return (
        f"{path!r} names a file, but {what}s are named by their module, so write "
        f"{module}:{given if colon else name} and run in the folder from which it can be imported"
    )
