"""A queue of Slurm for tests, with programs of its names that are fakes (fake_slurm.py)."""

import sys
from pathlib import Path

from launch.experiments import fake_slurm

from dase_grpc.launch.experiments.sites import SlurmSite
from dase_grpc.launch.experiments.slurm import SlurmQueue


class FakeSlurm:
    """Programs named as Slurm's, first in the PATH, and a queue of an experiment."""

    def __init__(self, folder: Path) -> None:
        self.programs = folder / "bin"
        self.programs.mkdir()
        for name in ("sbatch", "srun", "squeue"):
            program = self.programs / name
            program.write_text(f"#!{sys.executable} -S\n{Path(fake_slurm.__file__).read_text()}")
            program.chmod(0o755)
        self.file = folder / "queued.toml"
        self.file.write_text("[matrix]\nseeds = 3\n")
        self.queue = SlurmQueue(folder / "runs" / "e" / ".experiment" / "slurm")

    def submit(self, cells, **site) -> str:
        return self.queue.submit(
            self.file, cells, SlurmSite.model_validate(site), name="e", command=("dase",)
        )

    def script(self) -> str:
        (path,) = self.queue.folder.glob("*/*_submission.sh")
        return path.read_text()

    def set_queue(self, text: str) -> None:
        (self.programs / "queue.txt").write_text(text)

    def lines(self) -> list[str]:
        path = self.programs / "queue.txt"
        return path.read_text().splitlines() if path.exists() else []

    def refuse(self, text: str, *, by: str) -> None:
        (self.programs / f"{by}-refuses.txt").write_text(text)
