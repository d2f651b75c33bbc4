"""Paths that were meant to be runs: what each is instead, and which run may be meant.

Commands ask this before they import what takes seconds. A refusal, a RunDirectoryError, says what the path
is and which runs are near.
"""

import difflib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from dase_grpc.errors import RunDirectoryError
from dase_grpc.runs.directory import CHECKPOINT_FILE, RUN_FILE

SHOWN: Final = 5
"""How many runs of a folder are named."""

WHAT_IT_IS: Final = f"a run is a folder with a {RUN_FILE}, such as runs/NAME"
_ROOT: Final = Path("runs")


def require_run(path: Path) -> None:
    """Refuses what is no run's folder; what is in it is not read."""
    if not (path / RUN_FILE).is_file():
        raise RunDirectoryError(_elsewhere(path) or f"{path} is not a run: it has no {RUN_FILE}")


def require_policies(path: Path) -> None:
    """Refuses what cannot be a run's, an agent's or a checkpoint's folder."""
    telling = (RUN_FILE, CHECKPOINT_FILE, "checkpoints")
    if any((path / name).exists() for name in telling) or any(path.glob("step-*")):
        return
    if (path.is_dir() and run_of(path)) or (told := _elsewhere(path)) is None:
        told = f"{path} is neither a run, an agent's directory nor a checkpoint"
    raise RunDirectoryError(told)


def require_folders(paths: Sequence[Path]) -> None:
    """Refuses what is no folder."""
    for path in paths:
        if not path.is_dir():
            raise RunDirectoryError(_no_folder(path))


def runs_in(folder: Path) -> list[Path]:
    """The runs in a folder and, as those of an experiment lie, one folder deeper; the newest first."""
    found = [file for pattern in ("*", "*/*") for file in folder.glob(f"{pattern}/{RUN_FILE}")]
    shown = [file for file in found if not any(part[0] == "." for part in file.relative_to(folder).parts)]
    return _newest_first(file.parent for file in shown)


def run_of(path: Path) -> Path | None:
    """The run that a path lies in, absolute if the path is; None if it lies in none."""
    run = next((each for each in path.resolve().parents if (each / RUN_FILE).is_file()), None)
    return run if run is None or path.is_absolute() else Path(os.path.relpath(run))


def _elsewhere(path: Path) -> str | None:
    """What `path` is, if it is no folder, or one where runs are near; None of any other folder."""
    if not path.is_dir():
        return _no_folder(path)
    if owner := run_of(path):
        return f"{path} is a part of a run, not a run; give the run's own folder, {owner}"
    if runs := runs_in(path):
        one = "the run in it is" if len(runs) == 1 else f"there are {len(runs)} runs in it, the newest"
        return f"{path} is a folder of runs, not a run; {one} {_named(runs)}"
    return None


def _no_folder(path: Path) -> str:
    if path.exists():
        own = path.name == RUN_FILE
        return f"{path} is a file; " + (f"give the run's folder, {path.parent}" if own else WHAT_IT_IS)
    candidates = _newest_first({run for folder in (path.parent, _ROOT) for run in runs_in(folder)})
    names = {run.name: run for run in reversed(candidates)}
    if near := difflib.get_close_matches(path.name, names, n=1):
        return f"there is no {path}; did you mean {names[near[0]]}?"
    if candidates:
        return f"there is no {path}; there {'is' if len(candidates) == 1 else 'are'} {_named(candidates)}"
    return f"there is no {path}; {WHAT_IT_IS}"


def _named(runs: Sequence[Path]) -> str:
    more = len(runs) - SHOWN
    return ", ".join(map(str, runs[:SHOWN])) + (f" and {more} more" if more > 0 else "")


def _newest_first(runs: Iterable[Path]) -> list[Path]:
    return sorted(sorted(runs), key=_changed, reverse=True)


def _changed(run: Path) -> float:
    try:
        return (run / RUN_FILE).stat().st_mtime
    except OSError:  # it has gone meanwhile
        return 0.0
