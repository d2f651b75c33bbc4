"""Runs the chart, or an experiment's Job, on one machine without a cluster, until the run ends.

helm template rl deploy/helm/dase --set image.repository=localhost/dase > run.yaml
kubectl create secret generic dase-tls-replay --from-file=certs/replay --dry-run=client -o yaml > secrets.yaml
sudo python3 scripts/play_pods.py run.yaml secrets.yaml

dase experiment cells.toml --on kubernetes > job.yaml
sudo python3 scripts/play_pods.py job.yaml

StatefulSets, Indexed Jobs, Deployments and headless Services are worked out as their controllers would,
probes are asked, what ends is started again or replaced, Secrets and ConfigMaps are mounted as a kubelet does
it; podman plays the pods. The run is over when its Job is, or with Ctrl-C, which ends all pods in order, as
`helm uninstall` does; volumes of claims stay (`podman volume ls`). Not done: network policies, autoscaling,
disruption budgets, scheduling. Logs and manifests as played lie in --folder. Needs root, PyYAML and podman
(scripts/get_podman.sh).
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Final

import yaml
from pods.machine import Machine
from pods.podman import Podman, PodmanError
from pods.translation import NotPlayable, Release

EVERY_S: Final = 1.0
UNFINISHED: Final = 1
WANTED: Final = "give what `helm template`, or `dase experiment --on kubernetes`, prints"


def read_release(files: list[Path]) -> Release:
    """All manifests in these files; NotPlayable for anything else, and where no pod comes of them."""
    manifests = []
    for file in files:
        try:
            found = [each for each in yaml.safe_load_all(file.read_text(encoding="utf-8")) if each]
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise NotPlayable(f"{file} cannot be read as YAML: {error}") from None
        if not all(map(_is_manifest, found)):
            raise NotPlayable(f"{file} holds something that is no manifest; {WANTED}")
        manifests += found
    release = Release(tuple(manifests))
    if not release.pods():
        raise NotPlayable(f"no file holds anything that makes pods; {WANTED}")
    return release


def _is_manifest(found: object) -> bool:
    match found:
        case {"kind": str(), "metadata": {"name": str()}}:
            return True
    return False


def run(machine: Machine, release: Release, stop: Event) -> int:
    """Plays all pods until their Jobs are complete or `stop`; returns once none is left. The exit code."""
    for pod in release.pods():
        machine.begin(pod)
    with _left_in_order(machine):
        _until(machine, lambda: stop.is_set() or machine.complete, stop)
        complete = machine.complete  # before those that are told to leave count as over
    return 0 if complete and not machine.given_up else UNFINISHED


@contextmanager
def _left_in_order(machine: Machine) -> Iterator[None]:
    """Ends all pods after the block; where that fails too, what has failed in the block is what is raised."""
    try:
        yield
    except BaseException:
        try:
            _end(machine)
        except PodmanError as error:
            _say(f"pods may be left: {error}")
        raise
    _end(machine)


def _end(machine: Machine) -> None:
    machine.close()
    _until(machine, lambda: not machine.lives, Event())


def _until(machine: Machine, holds: Callable[[], bool], stop: Event) -> None:
    while not holds():
        machine.step()
        stop.wait(EVERY_S)


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def main() -> int:
    """Runs a release from files; see the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "files", nargs="+", type=Path, help="what `helm template` or `dase experiment` printed, and Secrets"
    )
    parser.add_argument("--folder", type=Path, default=Path("pods"), help="for logs, volumes and manifests")
    parser.add_argument(
        "--network", default="dase-pods", help="podman's network for the pods; made if needed"
    )
    options = parser.parse_args()
    folder, stop = options.folder.resolve(), Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    try:
        if os.geteuid() != 0:
            raise PodmanError("this needs root: volumes belong to root and are read by the pods' group")
        release = read_release(options.files)
        podman = Podman(folder / "played", options.network)
        podman.prepare()
        return run(Machine(release, podman, folder, say=_say), release, stop)
    except (NotPlayable, PodmanError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
