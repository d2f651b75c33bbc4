"""A Slurm of one's own on this machine, to try job scripts with: munged, slurmctld and slurmd, no systemd.

python scripts/local_slurm.py [--nodes 2] [--cpus 4] [--folder DIR] [COMMAND ...]

Runs the command, else a shell, where sbatch, squeue and so on speak to it; ends it all with the command. What
it writes lies in the folder, else in a temporary one. Needs root, and Debian's packages slurm-wlm and munge.
Every node is this machine, and claims as many CPUs as it is told.
"""

import argparse
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
READY_S = 30.0
CANCELLED_S = 20.0

CONFIGURATION = """
ClusterName=local
SlurmctldHost={host}
SlurmctldPort={first_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=10
MinJobAge=3600
{nodes}
PartitionName=local Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class NoSlurm(Exception):
    """It cannot be started here; says why."""


@dataclass(frozen=True)
class LocalSlurm:
    """A Slurm that runs."""

    folder: Path
    nodes: Sequence[str]

    @property
    def environment(self) -> dict[str, str]:
        """For processes that speak to it."""
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *command: str, timeout_s: float = 30.0) -> str:
        """What a command such as squeue prints.

        Raises:
            subprocess.CalledProcessError: it has failed.
        """
        done = subprocess.run(
            command, env=self.environment, check=True, capture_output=True, text=True, timeout=timeout_s
        )
        return done.stdout


@contextmanager
def local_slurm(folder: Path, *, nodes: int = 1, cpus: int = 4) -> Iterator[LocalSlurm]:
    """Runs while the block does.

    Raises:
        NoSlurm: a program is missing, this is not root, or it did not come up.
    """
    missing = [name for name in PROGRAMS if shutil.which(name, path=_path()) is None]
    if missing or os.geteuid():
        raise NoSlurm(f"needs root and {', '.join(missing or PROGRAMS)} (Debian: munge slurm-wlm)")
    names = [f"node{number}" for number in range(nodes)]
    first_port = _free_ports(nodes + 1)
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    (folder / "state").mkdir(exist_ok=True)
    (folder / "munge.key").write_bytes(secrets.token_bytes(128))
    (folder / "munge.key").chmod(0o600)
    (folder / "slurm.conf").write_text(_configuration(folder, names, first_port, cpus), encoding="ascii")
    slurm = LocalSlurm(folder, names)
    with ExitStack() as started:
        _start(started, folder, "munged", *_munged(folder))
        _start(started, folder, "slurmctld", "-D", "-f", str(folder / "slurm.conf"), "-i")
        for name in names:
            _start(started, folder, "slurmd", "-D", "-N", name, "-f", str(folder / "slurm.conf"))
        _until_idle(slurm)
        started.callback(_cancel_all, slurm)
        yield slurm


def _configuration(folder: Path, names: Sequence[str], first_port: int, cpus: int) -> str:
    host = socket.gethostname()
    nodes = [
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={first_port + 1 + number} CPUs={cpus} "
        f"RealMemory=1000 State=UNKNOWN"
        for number, name in enumerate(names)
    ]
    return CONFIGURATION.format(host=host, first_port=first_port, folder=folder, nodes="\n".join(nodes))


def _munged(folder: Path) -> list[str]:
    return [
        "--foreground",
        "--force",
        f"--key-file={folder / 'munge.key'}",
        f"--socket={folder / 'munge.socket'}",
        f"--pid-file={folder / 'munged.pid'}",
        f"--log-file={folder / 'munged.log'}",
        f"--seed-file={folder / 'munged.seed'}",
    ]


def _start(started: ExitStack, folder: Path, program: str, *arguments: str) -> None:
    """Starts a daemon that ends with the stack, whatever it has to say in a file of its own."""
    with (folder / f"{program}.out").open("ab") as out:
        process = subprocess.Popen(
            [str(shutil.which(program, path=_path())), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env={**os.environ, "SLURM_CONF": str(folder / "slurm.conf")},
        )
    started.callback(_end, process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _cancel_all(slurm: LocalSlurm) -> None:
    """Ends what still runs, for its processes would outlive those of Slurm."""
    slurm.run("scancel", "--user=root", "--full", "--signal=KILL")
    slurm.run("scancel", "--user=root")
    deadline = time.monotonic() + CANCELLED_S
    while slurm.run("squeue", "--noheader").strip() and time.monotonic() < deadline:
        time.sleep(0.2)


def _until_idle(slurm: LocalSlurm) -> None:
    """Waits until every node takes jobs."""
    deadline, seen = time.monotonic() + READY_S, ""
    while time.monotonic() < deadline:
        try:
            seen = slurm.run("sinfo", "--noheader", "--Node", "--format=%t")
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            seen = "no answer"
        if seen.split() == ["idle"] * len(slurm.nodes):
            return
        time.sleep(0.2)
    raise NoSlurm(f"its nodes are {seen.split()} after {READY_S:g} s; see {slurm.folder}")


def _free_ports(count: int) -> int:
    """The first of so many ports in a row that nobody has."""
    for first in range(26_817, 60_000, 97):
        try:
            for port in range(first, first + count):
                with socket.create_server(("", port)):
                    pass
        except OSError:
            continue
        return first
    raise NoSlurm("no free ports")


def _path() -> str:
    return f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def main() -> int:
    """Runs a command in a Slurm of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--cpus", type=int, default=4, help="CPUs that each node claims to have")
    parser.add_argument("--folder", type=Path, help="where its files go; else a temporary folder")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="else a shell")
    options = parser.parse_args()
    given = options.command[1:] if options.command[:1] == ["--"] else options.command
    command = given or [os.environ.get("SHELL", "/bin/sh")]
    with ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        try:
            slurm = stack.enter_context(local_slurm(folder, nodes=options.nodes, cpus=options.cpus))
        except NoSlurm as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        return subprocess.run(command, env=slurm.environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
