"""The job script of deploy/slurm in a Slurm of its own; what must lie in the buffer when it has ended."""

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from deploy.deployed import DEPLOY
from patience import wait_until

from dase_grpc.launch.drill.evidence import Life, Stored, problems, read_buffer, read_ledger, read_marks
from dase_grpc.learning.envs.make import make_env

SCRIPT = DEPLOY / "slurm" / "dase.sbatch"
PROGRAM = f"{sys.executable} -m dase_grpc"


def numbered_settings(folder: Path, *, agents: int, steps: int, pause_s: float) -> dict[str, Any]:
    """A small run whose environment numbers its steps, and keeps count of them in a folder."""
    kwargs = {"env_id": "Pendulum-v1", "kwargs": {}, "ledger": str(folder / "ledger"), "pause_s": pause_s}
    return {
        "env": {"id": "dase_grpc.launch.drill.evidence:Numbered", "kwargs": kwargs},
        "train": {"agents": agents, "steps": steps, "seed": 3, "log_every": 100, "checkpoint_every": 500},
        "agent": {"hidden": [16], "batch_size": 32, "start_steps": 100},
        "replay": {"capacity": 100_000, "min_size": 100},
        "eval": {"every": 10_000_000},
    }


@dataclass(frozen=True)
class Job:
    """A job of that script, and where its run lies."""

    slurm: Any
    number: str
    run: Path

    def field(self, name: str) -> str:
        """What `scontrol show job` says."""
        shown = self.slurm.run("scontrol", "show", "job", self.number)
        return re.search(rf"\b{name}=(\S+)", shown)[1]

    def until(self, holds: Callable[[], bool]) -> None:
        """Waits until something holds; what the job has said is in the error."""
        wait_until(holds, self.said)

    def said(self) -> str:
        """The logs of the job and its nodes."""
        logs = [*self.run.parent.glob("*.log"), *self.run.parent.glob("run.job/logs/*.log")]
        return "\n".join(f"== {log.name}\n{log.read_text()}" for log in logs)

    def steps_logged(self) -> list[int]:
        """How many lines of metrics each agent has written."""
        files = sorted(self.run.glob("agents/*/metrics.jsonl"))
        return [len(file.read_text().splitlines()) for file in files]


def submit(slurm: Any, folder: Path, settings: dict[str, Any], *flags: str, **variables: str) -> Job:
    """Queues a run with as many learners as its settings have agents."""
    (folder / "settings.toml").write_text(tomli_w.dumps(settings), encoding="utf-8")
    exported = {"DASE": PROGRAM, "DASE_RUN": str(folder / "run"), **variables}
    number = slurm.run(
        "sbatch",
        "--parsable",
        f"--ntasks={settings['train']['agents']}",
        f"--output={folder}/job.log",
        f"--export={','.join(('ALL', *(f'{name}={value}' for name, value in exported.items())))}",
        *flags,
        str(SCRIPT),
        f"--config={folder / 'settings.toml'}",
    )
    return Job(slurm, number.strip(), folder / "run")


def lost(run: Path, *, agents: int, ledger: Path) -> list[str]:
    """All that is wrong with the buffer of a run whose processes all ended well; nothing if all is right."""
    stored, taken = read_buffer(run / "replay", agents=agents), read_ledger(ledger)
    env = make_env("Pendulum-v1", {})
    try:
        return problems(stored, _lives(stored, {entry.number: entry.pid for entry in taken}, env), taken, env)
    finally:
        env.close()


def _lives(stored: Stored, pids: dict[int, int], env: Any) -> Sequence[Life]:
    """Each agent's processes, in the order in which their transitions were stored."""
    lives = []
    for agent_id in stored.committed:
        rows = stored.rows[stored.schema.agent_ids(stored.rows) == agent_id]
        numbers = read_marks(rows, stored.schema, env).number
        first = sorted(np.unique(numbers, return_index=True)[1].tolist())
        lives += [Life(agent_id, pids[int(numbers[index])], 0, ended_well=True) for index in first]
    return lives
