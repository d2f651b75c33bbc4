"""Stands for sbatch, srun, squeue and scontrol in tests: a queue that is a folder, whose tasks never start.

The folder is that of this program. `queue.txt` in it holds what squeue shows, a line for each task:
name|job|index|state. `sbatch-refuses.txt` holds what sbatch says instead of taking a job, and
`sbatch-fails.txt` after it has; `squeue-refuses.txt` what squeue says instead of an answer.
"""

import os
import re
import sys
from pathlib import Path

FOLDER = Path(sys.argv[0]).parent
QUEUE = FOLDER / "queue.txt"


def flags(script: str) -> dict[str, str]:
    """What a job script asks for."""
    found = re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", script, re.MULTILINE)
    return {flag: value.strip("'") for flag, value in found}


def sbatch() -> None:
    asked = flags(Path(sys.argv[1]).read_text())
    first = QUEUE.read_text().splitlines() if QUEUE.exists() else []
    job = 100 + len(first)
    last = re.match(r"0-(\d+)%", asked.get("array", ""))
    indices = ["N/A"] if last is None else list(map(str, range(int(last[1]) + 1)))
    lines = [f"{asked['job-name']}|{job}|{index}|PENDING" for index in indices]
    QUEUE.write_text("\n".join([*first, *lines, ""]))
    sys.stdout.write(f"Submitted batch job {job}\n")


def squeue() -> None:
    (names,) = (part.removeprefix("--name=") for part in sys.argv if part.startswith("--name="))
    state = os.environ.get("SQUEUE_STATES", "")
    for line in QUEUE.read_text().splitlines() if QUEUE.exists() else ():
        if line.split("|")[0] in names.split(",") and line.endswith(state):
            sys.stdout.write(f"{line}\n")


def end_by(said: Path) -> None:
    if said.exists():
        sys.exit(said.read_text())


def main() -> None:
    name = Path(sys.argv[0]).name
    end_by(FOLDER / f"{name}-refuses.txt")
    {"sbatch": sbatch, "squeue": squeue}[name]()
    end_by(FOLDER / f"{name}-fails.txt")


if __name__ == "__main__":
    main()
