"""Podman, as far as it is needed to play pods on a network of their own."""

import json
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

CALL_S: Final = 120.0
"""A call that takes longer has failed; none of these waits for what runs in a container."""

MOST: Final = 16_384
"""Open files, and processes, of a container at most: podman itself has no more than 32,768 to hand on."""

AGAIN_S: Final = 0.2
"""What has not succeeded yet is tried again after as long."""

Words = Sequence[str]

_ENDED: Final = {"exited", "stopped"}


class PodmanError(Exception):
    """Podman is not there, or refuses; says what it was asked and what it said."""


@dataclass(frozen=True)
class State:
    """A container as podman has it; `exit_code` says something once it has ended, `pid` before."""

    ended: bool
    exit_code: int
    pid: int


@dataclass(frozen=True)
class Podman:
    """Calls podman.

    Attributes:
        folder: for what it is told: its configuration, and each manifest that it plays.
        network: the network that pods are on, with names; made where it is not there.
        storage: options that say where images are, if not where podman has them by itself.
    """

    folder: Path
    network: str
    storage: tuple[str, ...] = ()

    def prepare(self) -> None:
        """Writes the configuration and makes the network.

        Raises:
            PodmanError: podman is not there, or this user or machine may not.
        """
        if shutil.which("podman") is None:
            raise PodmanError("there is no podman here; scripts/get_podman.sh installs it")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._configuration.write_text(_configuration(), encoding="utf-8")
        if self.network not in self.run("network", "ls", "--format={{.Name}}").split():
            self.run("network", "create", self.network)

    def run(self, *words: str) -> str:
        """What podman prints; raises PodmanError where it fails."""
        return self._said(words, errors=subprocess.PIPE)

    def _said(self, words: Words, *, errors: int) -> str:
        environment = {**os.environ, "CONTAINERS_CONF": str(self._configuration)}
        command = ["podman", *self.storage, *words]
        try:
            done = subprocess.run(
                command,
                check=False,
                stdout=subprocess.PIPE,
                stderr=errors,
                encoding="utf-8",
                errors="replace",
                timeout=CALL_S,
                env=environment,
                start_new_session=True,  # Ctrl-C is not podman's to heed
            )
        except subprocess.TimeoutExpired:
            raise PodmanError(f"`podman {' '.join(words)}` has not ended after {CALL_S:g} s") from None
        if done.returncode:
            raise PodmanError(
                f"`podman {' '.join(words)}` failed: {(done.stderr or done.stdout).strip()[-500:]}"
            )
        return done.stdout

    def play(self, manifest: Mapping[str, Any], aliases: Sequence[str], awaited: Mapping[str, Words]) -> str:
        """Starts a pod, which others find under these names too; returns its address.

        Its containers start one after the other; of those in `awaited` each has started once that command
        succeeds in it. Where one does not start, nothing is left of the pod.
        """
        name = manifest["metadata"]["name"]
        try:
            self._play(name, manifest, aliases, awaited)
            return self.address(name)
        except PodmanError:
            self.remove(name)
            raise

    def _play(
        self,
        name: str,
        manifest: Mapping[str, Any],
        aliases: Sequence[str],
        awaited: Mapping[str, Words],
    ) -> None:
        file = self.folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump(dict(manifest)), encoding="utf-8")
        options = ",".join(f"alias={alias}" for alias in aliases)
        network = f"--network={self.network}{':' if options else ''}{options}"
        self.run("kube", "play", "--start=false", network, str(file))
        for container in manifest["spec"]["containers"]:
            self.run("start", f"{name}-{container['name']}")
            if container["name"] in awaited:
                self._await(f"{name}-{container['name']}", awaited[container["name"]])

    def _await(self, container: str, words: Words) -> None:
        """Returns when a command has succeeded in a container."""
        limit = time.monotonic() + CALL_S
        while True:
            try:
                self.run("exec", container, *words)
            except PodmanError:
                if time.monotonic() > limit:
                    raise
                time.sleep(AGAIN_S)
            else:
                return

    def address(self, pod: str) -> str:
        """Where a pod that runs is on the network."""
        infra = json.loads(self.run("pod", "inspect", pod))["InfraContainerID"]
        (inspected,) = json.loads(self.run("container", "inspect", infra))
        return str(inspected["NetworkSettings"]["Networks"][self.network]["IPAddress"])

    def states(self) -> dict[str, State]:
        """All containers, by name."""
        return {
            each["Names"][0]: State(each["State"] in _ENDED, each["ExitCode"], each["Pid"])
            for each in json.loads(self.run("ps", "--all", "--format=json"))
        }

    def start(self, pod: str, container: str) -> str:
        """Starts a container again that has ended; returns its pod's address, which may be another."""
        self.run("start", container)
        return self.address(pod)

    def send(self, container: str, signal: str) -> None:
        """Sends a signal to a container's first process; to one that has ended meanwhile, none."""
        try:
            self.run("kill", f"--signal={signal}", container)
        except PodmanError:
            if not self.states()[container].ended:
                raise

    def logs(self, container: str) -> str:
        """What a container has written so far, since it was made."""
        return self._said(("logs", container), errors=subprocess.STDOUT)

    def remove(self, pod: str) -> None:
        """Kills what runs of a pod, if it is there, and forgets it; its claims' volumes stay."""
        self.run("pod", "rm", "--force", "--ignore", "--time=0", pod)

    @property
    def _configuration(self) -> Path:
        return self.folder / "containers.conf"


def _configuration() -> str:
    """Limits that a process may hand on which may not raise its own; runc where crun refuses the cgroups."""
    limits = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC}
    hard = {name: resource.getrlimit(number)[1] for name, number in limits.items()}
    most = {
        name: MOST if limit == resource.RLIM_INFINITY else min(limit, MOST) for name, limit in hard.items()
    }
    text = f"[containers]\ndefault_ulimits = {[f'{name}={limit}:{limit}' for name, limit in most.items()]}\n"
    unified = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    return text if unified else f'{text}[engine]\nruntime = "runc"\n'
