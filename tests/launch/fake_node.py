"""Stands for `dase node` in tests of the launcher: starts in milliseconds and behaves as it is told.

Arguments: a folder for pid files, a JSON object from node name to behaviour, then those of `dase`.
A behaviour such as "be killed, end" is one for each start; the last is that of all later ones.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

LAST_STEP = 120  # of small_config
READY = "listening on 127.0.0.1:1"  # nobody listens there


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def until_told(*, patient: bool = False) -> None:
    """Waits for SIGTERM or the end of the leash; a patient one for SIGKILL only."""

    def on_signal(number: int, frame: FrameType | None) -> None:
        if not patient:
            say("told to end")
            sys.exit(0)

    signal.signal(signal.SIGTERM, on_signal)
    say("waiting")
    while sys.stdin.read(1) or patient:
        time.sleep(0.01)


def serve(behaviour: str) -> None:
    """What a replay can do."""
    match behaviour:
        case "serve":
            say(READY)
            until_told()
        case "serve briefly":
            say(READY)
            time.sleep(0.3)
            sys.exit(1)
        case "serve until the disk is full":
            say(READY)
            sys.exit(2)
        case "serve until the others train":
            say(READY)
            while not all(log.exists() and "waiting" in log.read_text() for log in learner_logs()):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        case "say nonsense":
            say("good morning")
            until_told()
        case _:
            behave(behaviour)


def behave(behaviour: str) -> None:
    """What any node can do."""
    match behaviour:
        case "train":
            until_told()
        case "ignore SIGTERM":
            subprocess.Popen(["sleep", "600"])
            until_told(patient=True)
        case "import slowly":
            time.sleep(600)
        case "flood":
            say("x" * 1_000_000)
            keep_checkpoint(LAST_STEP)
        case "raise":
            raise RuntimeError("the simulator broke")
        case "refuse":
            sys.exit(2)
        case "find the disk full":
            sys.exit(4)
        case "be fenced off":
            sys.stderr.write("error: fenced off\n")
            sys.exit(3)
        case "be killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "explore until all is learned":
            while not list(
                Path(flags()["config"]).parent.glob(f"agents/{flags()['agent']}/*/step-*{LAST_STEP}")
            ):
                time.sleep(0.01)
            say("has finished")
        case _:
            train(behaviour)


def train(behaviour: str) -> None:
    """What a learner can do."""
    match behaviour:
        case "end early":
            pass
        case "fail a checkpoint later each time":
            kept = sorted(checkpoints().glob("step-*"))
            keep_checkpoint(1 + (int(kept[-1].name.removeprefix("step-")) if kept else 0))
            raise RuntimeError("the simulator broke")
        case "leave a simulator and be killed":
            leave_a_simulator()
            os.kill(os.getpid(), signal.SIGKILL)
        case "leave a simulator":
            leave_a_simulator()
            keep_checkpoint(LAST_STEP)
        case "end":
            keep_checkpoint(LAST_STEP)


def flags() -> dict[str, str]:
    """The arguments for `dase`, by name."""
    return dict(part.removeprefix("--").split("=", 1) for part in sys.argv[3:] if "=" in part)


def checkpoints() -> Path:
    """The folder of the agent's checkpoints."""
    return Path(flags()["run-dir"], "agents", flags()["agent"], "checkpoints")


def keep_checkpoint(step: int) -> None:
    """An empty one."""
    (checkpoints() / f"step-{step:09d}").mkdir(parents=True, exist_ok=True)


def leave_a_simulator() -> None:
    """Starts a process that holds this one's open files and does not notice its end."""
    if child := os.fork():
        Path(sys.argv[1], f"{child}.simulator").touch()
        return
    time.sleep(600)
    os._exit(0)


def learner_logs() -> list[Path]:
    folder = Path(os.readlink(f"/proc/self/fd/{sys.stderr.fileno()}")).parent
    return [folder / f"learner-{agent_id}.log" for agent_id in (0, 1)]


def main() -> None:
    folder, behaviours, *arguments = sys.argv[1:]
    name = Path(os.readlink(f"/proc/self/fd/{sys.stderr.fileno()}")).stem
    file = Path(folder) / name
    given = json.dumps([*arguments, f"OMP={os.environ['OMP_NUM_THREADS']}"])
    file.with_suffix(".args").write_text(given)
    with file.with_suffix(".starts").open("a+") as starts:
        starts.write(f"{given}\n")
        starts.seek(0)
        started = len(starts.readlines())
    file.with_suffix(".new").write_text(str(os.getpid()))
    file.with_suffix(".new").rename(file.with_suffix(".pid"))  # whole, or not there
    each = json.loads(behaviours)[name].split(", ")
    (serve if name == "replay" else behave)(each[min(started, len(each)) - 1])


if __name__ == "__main__":
    main()
