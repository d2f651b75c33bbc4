"""`dase` as a process: its surroundings, its signals, what is left running, and how it ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from children import importing, until_ended
from patience import PATIENCE_S
from synthetic import flat, write_run

import dase_grpc
from dase_grpc.errors import ConfigError
from dase_grpc.runs.reports.comparison_tables import FILES


def ended(command: list[object], **more: object) -> subprocess.CompletedProcess[str]:
    """A process that has run to its end, which comes by itself, and what it has written."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
    return subprocess.run(command, timeout=PATIENCE_S, check=False, **pipes)


def test_python_dash_m_is_the_same_command(dase):
    done = ended([sys.executable, "-m", "dase_grpc", "version"], text=True)
    assert (done.returncode, done.stdout, done.stderr) == dase("version")


def test_a_folder_that_is_gone_is_one_sentence(tmp_path):
    gone = tmp_path / "gone"
    script = f"mkdir {gone} && cd {gone} && rmdir {gone} && exec {sys.executable} -m dase_grpc compare runs"
    done = ended(["sh", "-c", script], text=True, env=importing(Path(dase_grpc.__file__).parents[1]))
    sentence = "error: the current folder does not exist any more; change into one that does\n"
    assert (done.returncode, done.stderr) == (2, sentence)


@pytest.mark.slow
def test_a_path_that_is_no_utf8_and_a_terminal_that_is_none_do_no_harm(tmp_path):
    folder = os.fsencode(tmp_path) + b"/by\xfft"
    os.mkdir(folder)
    write_run(Path(os.fsdecode(folder)), "run", flat(1))
    command = [sys.executable, "-m", "dase_grpc", "compare", folder, "--out", folder + b"/out"]
    done = ended(command, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert b"by\\udcfft/out/comparison.html" in done.stdout
    assert sorted(map(os.fsdecode, os.listdir(folder + b"/out"))) == sorted(FILES)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_an_output_on_a_full_disk_is_one_sentence():
    with Path("/dev/full").open("w") as full:
        done = ended([sys.executable, "-m", "dase_grpc", "config"], stdout=full, text=True)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert "No space left on device" in done.stderr


def test_ctrl_c_while_modules_are_loaded_is_no_traceback(monkeypatch, capsys):
    from dase_grpc.__main__ import run

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("dase_grpc.cli.main.main", interrupted)
    monkeypatch.setattr("dase_grpc.__main__._bounded", lambda last_resort: None)
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as end:
            run()
        os.kill(os.getpid(), signal.SIGINT)  # once more, while it ends
    finally:
        signal.signal(signal.SIGINT, before)
    assert end.value.code == 130
    assert capsys.readouterr().err == ""


LEAVES_A_PROCESS = """
import multiprocessing, time
from dase_grpc import __main__
from dase_grpc.cli import main as cli

def main():
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    process.start()
    print(process.pid, flush=True)

cli.main, __main__.EXIT_S = main, 0.1
__main__.run()
"""


def test_a_process_that_an_environment_has_left_running_does_not_keep_a_command_from_ending():
    done = ended([sys.executable, "-c", LEAVES_A_PROCESS], text=True)
    assert (done.returncode, done.stderr) == (0, "")
    until_ended(int(done.stdout))


@pytest.mark.parametrize("command", [["train"], ["resume", "runs/run"], ["node", "--role=learner"]])
def test_what_runs_on_a_leash_heeds_it_before_it_loads_anything(command, monkeypatch, dase):
    given = []

    def noted(*, stdin_is_leash):
        given.append(stdin_is_leash)
        raise ConfigError("noted")

    monkeypatch.setattr("dase_grpc.cli.flags.end_with_launcher", noted)
    for arguments in (command, [*command, "--stdin-is-leash"]):
        assert dase(*arguments) == (2, "", "error: noted\n")
    assert given == [False, True]
