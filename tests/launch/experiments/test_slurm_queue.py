"""What is queued on Slurm, what is known of it afterwards, what a task does; sbatch and squeue are fakes."""

import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from contracts.sentences import assert_one_sentence
from launch.experiment_cases import small_cells
from launch.experiments import fake_slurm
from launch.experiments.slurm_cases import FakeSlurm
from patience import PATIENCE_S

from dase_grpc.errors import ConfigError, RunDirectoryError, SchedulerError
from dase_grpc.launch.experiments import slurm as slurm_module
from dase_grpc.launch.experiments import task as task_module
from dase_grpc.launch.experiments.slurm import SUBMISSION_FILE, require_slurm
from dase_grpc.launch.experiments.task import IN_VAIN, NOTHING_KEPT, STOPPED, CellTask

submitit = pytest.importorskip("submitit")


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    fake = FakeSlurm(tmp_path)
    monkeypatch.setenv("PATH", f"{fake.programs}:/usr/bin:/bin")
    return fake


# -- what is queued -----------------------------------------------------------------------------------


def test_the_missing_cells_are_one_array_with_the_limits_of_the_file(slurm):
    cells = small_cells(seed=[0, 1, 2])
    name = slurm.submit(
        cells,
        at_once=2,
        partition="long",
        time_minutes=90,
        stop_s=200,
        memory="1.5GiB",
        gpus=1,
        setup=["module load cuda"],
        sbatch={"account": "ours", "exclusive": True},
    )
    asked = fake_slurm.flags(slurm.script())
    assert re.fullmatch(r"e-[0-9a-f]{8}", name)
    wanted = {
        **{"job-name": name, "array": "0-2%2", "partition": "long", "time": "90", "signal": "USR2@200"},
        **{"mem": "1536M", "gpus-per-node": "1", "cpus-per-task": "1", "account": "ours"},
        **{"requeue": "", "exclusive": "", "open-mode": "append"},
    }
    assert wanted.items() <= asked.items()
    assert "wckey" not in asked
    assert "\nmodule load cuda\n" in slurm.script()


def test_each_index_is_a_cell_by_its_name_and_slurm_is_asked_which_it_still_has(slurm):
    cells = small_cells(seed=[0, 1, 2])
    name = slurm.submit(cells)
    tasks = slurm.queue.tasks()
    assert [(cell, task.job, task.state) for cell, task in tasks.items()] == [
        ("seed-0", "100_0", "PENDING"),
        ("seed-1", "100_1", "PENDING"),
        ("seed-2", "100_2", "PENDING"),
    ]
    assert [task.identity for task in tasks.values()] == [cell.identity for cell in cells]
    slurm.set_queue(f"{name}|100|1|RUNNING\nanother|7|0|RUNNING\n")
    assert {cell: task.runs for cell, task in slurm.queue.tasks().items()} == {"seed-1": True}
    slurm.set_queue("")
    assert slurm.queue.tasks() == {}


@pytest.mark.parametrize("line", ["Welcome!", "{name}|100|7|RUNNING", "another|100|0|RUNNING", "{name}|1"])
def test_a_line_of_squeues_that_is_no_task_is_one_sentence(slurm, monkeypatch, line):
    name = slurm.submit(small_cells(seed=[0, 1]))
    monkeypatch.setattr(slurm_module, "_told", lambda *command: f"{line.format(name=name)}\n")
    with pytest.raises(SchedulerError) as caught:
        slurm.queue.tasks()
    assert_one_sentence(caught.value, "squeue prints")


def test_a_task_is_known_also_to_who_has_squeue_show_others_alone(slurm, monkeypatch):
    slurm.submit(small_cells(seed=[0, 1]))
    monkeypatch.setenv("SQUEUE_STATES", "RUNNING")
    assert set(slurm.queue.tasks()) == {"seed-0", "seed-1"}


def test_what_a_task_runs_is_a_command_with_the_cells_name_and_the_file_as_it_was(slurm):
    slurm.submit(small_cells(seed=[0, 1]), gpus=1)
    slurm.file.write_text("[matrix]\nseeds = 9\n")
    pickled = sorted(slurm.queue.folder.glob("*/*_submitted.pkl"))
    found = [submitit.core.utils.DelayedSubmission.load(path) for path in pickled]
    assert [each.args for each in found] == [("seed-0",), ("seed-1",)]
    program, command, file, runs, gpu = found[0].function.command
    assert (program, command, gpu) == ("dase", "experiment", "--gpu=0")
    assert Path(file).read_text() == "[matrix]\nseeds = 3\n"
    assert Path(file).name == "e.toml"
    assert runs == f"--runs={slurm.queue.folder.parents[2]}"
    assert pickled[0].name == "100_0_0_submitted.pkl" or pickled[0].name == "100_0_submitted.pkl"


def test_one_cell_is_a_job_and_no_array(slurm):
    slurm.submit(small_cells(seed=[4]))
    assert "array" not in fake_slurm.flags(slurm.script())
    assert {cell: task.job for cell, task in slurm.queue.tasks().items()} == {"run": "100"}


def test_a_cluster_is_given_as_many_cores_as_it_keeps_busy(slurm):
    slurm.submit(small_cells(mode="cluster", train__agents=[1, 3]))
    assert fake_slurm.flags(slurm.script())["cpus-per-task"] == "4"


def test_a_job_is_known_although_its_submitter_was_killed_before_it_heard_of_it(slurm, monkeypatch):
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(submitit.SlurmExecutor, "_get_job_id_from_submission_command", killed)
    with pytest.raises(KeyboardInterrupt):
        slurm.submit(small_cells(seed=[0, 1]))
    assert set(slurm.queue.tasks()) == {"seed-0", "seed-1"}


def test_of_a_cell_that_is_queued_twice_the_task_that_runs_counts(slurm):
    cells = small_cells(seed=[0, 1])
    names = [slurm.submit(cells), slurm.submit(cells)]
    slurm.set_queue(f"{names[0]}|1|0|RUNNING\n{names[1]}|2|0|PENDING\n{names[1]}|2|1|PENDING\n")
    assert {cell: task.job for cell, task in slurm.queue.tasks().items()} == {
        "seed-0": "1_0",
        "seed-1": "2_1",
    }


# -- what cannot be -----------------------------------------------------------------------------------


def test_a_refusal_of_slurm_is_one_sentence(slurm):
    slurm.refuse("sbatch: error: invalid partition specified: fast\n", by="sbatch")
    with pytest.raises(SchedulerError) as refused:
        slurm.submit(small_cells(seed=[0, 1]))
    assert_one_sentence(
        refused.value, "Slurm refuses the job", "invalid partition specified: fast", "[slurm]"
    )


def test_nothing_is_left_of_a_job_that_slurm_refuses_and_says_not_to_have(slurm):
    slurm.submit(small_cells(seed=[0]))
    (before,) = slurm.queue.folder.iterdir()
    slurm.refuse("sbatch: error: invalid partition specified: fast\n", by="sbatch")
    with pytest.raises(SchedulerError):
        slurm.submit(small_cells(seed=[1]))
    assert list(slurm.queue.folder.iterdir()) == [before]
    slurm.refuse("slurm_load_jobs error: Unable to contact slurm controller\n", by="squeue")
    with pytest.raises(SchedulerError):
        slurm.submit(small_cells(seed=[1]))
    assert len(list(slurm.queue.folder.iterdir())) == 2


def test_a_job_that_slurm_has_taken_is_known_although_sbatch_failed(slurm):
    (slurm.programs / "sbatch-fails.txt").write_text("sbatch: error: Socket timed out\n")
    with pytest.raises(SchedulerError, match="Socket timed out"):
        slurm.submit(small_cells(seed=[0, 1]))
    assert len(slurm.queue.tasks()) == 2


def test_a_queue_that_does_not_answer_is_told(slurm):
    slurm.submit(small_cells(seed=[0, 1]))
    slurm.refuse("slurm_load_jobs error: Unable to contact slurm controller\n", by="squeue")
    with pytest.raises(SchedulerError) as refused:
        slurm.queue.tasks()
    assert_one_sentence(refused.value, "squeue fails", "Unable to contact slurm controller")


@pytest.mark.parametrize("change", [("seed-1", "seed-7"), ("{", "")], ids=["changed", "no JSON"])
def test_a_damaged_note_of_what_was_queued_is_refused(slurm, change):
    slurm.submit(small_cells(seed=[0, 1]))
    (note,) = slurm.queue.folder.glob(f"*/{SUBMISSION_FILE}")
    note.write_text(note.read_text().replace(*change))
    with pytest.raises(RunDirectoryError) as refused:
        slurm.queue.tasks()
    assert_one_sentence(refused.value, str(note))


def test_without_slurm_or_submitit_nothing_is_tried(slurm, monkeypatch):
    require_slurm()
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ConfigError) as refused:
        require_slurm()
    assert_one_sentence(refused.value, 'pip install "dase-grpc[slurm]"')
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError) as refused:
        require_slurm()
    assert_one_sentence(refused.value, "--on slurm finds no sbatch, srun, squeue in the PATH")


@pytest.mark.parametrize("name", ["SBATCH_CLUSTERS", "SBATCH_CLUSTER_CONSTRAINT", "SBATCH_JOB_NAME"])
def test_nothing_is_tried_where_the_environment_would_have_jobs_that_squeue_does_not_find(
    slurm, monkeypatch, name
):
    monkeypatch.setenv(name, "other")
    with pytest.raises(ConfigError) as refused:
        require_slurm()
    assert_one_sentence(refused.value, f"{name} is to be unset for --on slurm")


# -- what a task does ---------------------------------------------------------------------------------

POPEN = subprocess.Popen
ENDS = "import sys; sys.exit({code})"
WAITS = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit({code}))
signal.raise_signal(signal.SIGUSR2)  # as Slurm does to all processes of a task
print("ready", flush=True)
while True:
    time.sleep(0.01)
"""


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch):
    monkeypatch.setattr(task_module, "LOOK_EVERY_S", 0.01)


def task(program: str, folder: Path, *, in_vain: int = 0) -> CellTask:
    return CellTask((sys.executable, "-S", "-c", program), str(folder), in_vain)


def test_a_task_ends_as_its_cell(tmp_path):
    task(ENDS.format(code=0), tmp_path)("seed-0")
    with pytest.raises(SystemExit) as ended:
        task(ENDS.format(code=1), tmp_path)("seed-0")
    assert ended.value.code == 1
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    with pytest.raises(SystemExit) as ended:
        task(killed, tmp_path)("seed-0")
    assert ended.value.code == 128 + signal.SIGKILL


class TimeIsUp(Exception):
    """Leaves the task as submitit's handler does, with what is to be queued again."""


def signalled(code: int, folder: Path, monkeypatch, *, in_vain: int = 0) -> CellTask:
    """What is queued again after the signal before the limit has come to a task that trains."""
    started = threading.Event()

    class Piped(POPEN):
        def __init__(self, *args, **options) -> None:
            super().__init__(*args, stdout=subprocess.PIPE, **options)
            assert self.stdout is not None
            assert self.stdout.readline() == b"ready\n"
            self.stdout.close()
            started.set()

    monkeypatch.setattr(task_module.subprocess, "Popen", Piped)
    running = task(WAITS.format(code=code), folder, in_vain=in_vain)
    queued = []

    def handle(*_: object) -> None:
        queued.append(running.checkpoint("seed-0"))
        raise TimeIsUp

    def send(to: int) -> None:
        assert started.wait(PATIENCE_S)
        signal.pthread_kill(to, signal.SIGUSR2)

    before = signal.signal(signal.SIGUSR2, handle)
    sender = threading.Thread(target=send, args=(threading.get_ident(),))
    sender.start()
    try:
        with pytest.raises(TimeIsUp):
            running("seed-0")
    finally:
        sender.join()
        signal.signal(signal.SIGUSR2, before)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})
    (again,) = queued
    assert again.args == ("seed-0",)
    assert again.function.command == running.command
    return again.function


def test_before_its_limit_a_task_has_its_cell_stop_and_is_queued_again(tmp_path, monkeypatch):
    assert signalled(STOPPED, tmp_path, monkeypatch, in_vain=2).in_vain == 0


def test_a_cell_that_keeps_nothing_is_queued_again_only_so_often(tmp_path, monkeypatch):
    assert signalled(NOTHING_KEPT, tmp_path, monkeypatch, in_vain=IN_VAIN - 1).in_vain == IN_VAIN
    with pytest.raises(SystemExit) as ended:
        signalled(NOTHING_KEPT, tmp_path, monkeypatch, in_vain=IN_VAIN)
    assert ended.value.code == NOTHING_KEPT


def test_a_cell_that_ends_while_it_is_told_to_stop_is_not_queued_again(tmp_path, monkeypatch):
    with pytest.raises(SystemExit) as ended:
        signalled(0, tmp_path, monkeypatch)
    assert ended.value.code == 0


def test_a_task_that_has_not_begun_is_queued_again(tmp_path):
    again = task(ENDS.format(code=0), tmp_path).checkpoint("seed-0")
    blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})
    assert signal.SIGUSR2 in blocked  # the same signal once more would find it in the middle of this
    assert (again.args, again.function.in_vain) == (("seed-0",), 0)
