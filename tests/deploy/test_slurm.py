"""The job script in a real Slurm of this machine: two nodes that are one, a requeue in the middle."""

import sys

import pytest
from children import ran
from deploy.deployed import PROJECT
from deploy.jobs import SCRIPT, lost, numbered_settings, submit

from dase_grpc.launch.drill.evidence import read_buffer

AGENTS, STEPS = 2, 900


@pytest.mark.slow
@pytest.mark.long
def test_a_job_that_is_requeued_in_the_middle_runs_to_its_end_and_loses_nothing(slurm, tmp_path):
    settings = numbered_settings(tmp_path, agents=AGENTS, steps=STEPS, pause_s=0.004)
    job = submit(slurm, tmp_path, settings, "--nodes=2", "--ntasks-per-node=1")
    job.until(lambda: len(job.steps_logged()) == AGENTS and min(job.steps_logged()) >= 3)
    slurm.run("scancel", "--batch", "--signal=TERM", job.number)  # as --signal=B:TERM before the limit
    job.until(lambda: job.field("JobState") == "COMPLETED")
    assert job.field("Restarts") == "1"
    stored = read_buffer(job.run / "replay", agents=AGENTS)
    assert dict(stored.committed) == dict.fromkeys(range(AGENTS), STEPS), job.said()
    assert lost(job.run, agents=AGENTS, ledger=tmp_path / "ledger") == []
    verified = ran(sys.executable, "-m", "dase_grpc", "verify", job.run, cwd=PROJECT)
    assert verified.returncode == 0, verified.stdout
    assert "Traceback" not in job.said()


def test_the_job_script_is_one_that_bash_reads_and_asks_for_time_to_end_in():
    checked = ran("bash", "-n", SCRIPT)
    assert (checked.returncode, checked.stderr) == (0, "")
    asked = [line.split()[1] for line in SCRIPT.read_text().splitlines() if line.startswith("#SBATCH")]
    assert {"--requeue", "--open-mode=append", "--signal=B:TERM@180"} <= set(asked)
