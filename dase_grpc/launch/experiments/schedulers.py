"""Schedulers: what the programs of Slurm and Kubernetes answer."""

import subprocess
from collections.abc import Mapping, Sequence
from typing import Final

from dase_grpc.errors import SchedulerError

ANSWER_S: Final = 120.0
"""How long a scheduler's program may take."""


def told(
    command: Sequence[str], *, asked: str, given: str = "", variables: Mapping[str, str] | None = None
) -> str:
    """What a scheduler's program prints, with `given` as its input.

    Raises:
        SchedulerError: it is not there, does not answer or fails; `asked` names it.
    """
    try:
        done = subprocess.run(
            command,
            input=given,
            env=variables,
            capture_output=True,
            encoding="utf-8",  # as the YAML for kubectl has to be
            errors="replace",
            timeout=ANSWER_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SchedulerError(f"{asked} does not answer: {error}") from None
    if done.returncode:
        raise SchedulerError(f"{asked} fails: {last_line(done.stderr)}")
    return done.stdout


def last_line(text: str) -> str:
    """The last line of what a command says that is not blank."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "without a word"
