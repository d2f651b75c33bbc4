"""The provenance of a result besides its configuration: versions of software and derived seeds."""

import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from dase_grpc.config.resolve import RunConfig
from dase_grpc.seeding import Purpose, integer

DISTRIBUTIONS: Final = {
    "dase": "dase-grpc",
    "torch": "torch",
    "numpy": "numpy",
    "gymnasium": "gymnasium",
    "mujoco": "mujoco",
    "grpc": "grpcio",
}
_CHECKOUT: Final = Path(__file__).resolve().parents[2]
_GIT_TIMEOUT_S: Final = 5


def versions() -> dict[str, str]:
    """The versions of this project, Python and the libraries that decide numbers; none is imported."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name, distribution in DISTRIBUTIONS.items():
        try:
            found[name] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    revision = git_revision(_CHECKOUT)
    return {**found, "git": revision} if revision else found


def git_revision(checkout: Path) -> str | None:
    """The commit of the project's checkout, with `-dirty` where files differ from it; else None.

    An installed package lies in no checkout of its own, so nothing above `checkout` is asked.
    """
    git = shutil.which("git")
    if git is None or not (checkout / ".git").exists():
        return None
    command = [git, "-C", str(checkout), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None


def derived_seeds(config: RunConfig) -> dict[str, Any]:
    """The integer seeds that training derives from train.seed; lists go by agent id.

    Exploring and sampling draw from NumPy's generators, which have no such number. Each exploring
    episode has a seed of its own; `environment` lists those of the first ones.
    """
    seed, agents = config.train.seed, range(config.train.agents)
    return {
        "evaluation": integer(seed, Purpose.EVALUATION),
        "networks": [integer(seed, Purpose.NETWORKS, agent) for agent in agents],
        "environment": [integer(seed, Purpose.ENVIRONMENT, agent, 0) for agent in agents],
        "target_noise": [integer(seed, Purpose.TARGET_NOISE, agent) for agent in agents],
    }
