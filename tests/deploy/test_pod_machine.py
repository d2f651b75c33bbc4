"""Pods without a cluster: what becomes of them on the machine that plays them, and when a run is over."""

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from threading import Event

import play_pods
import pytest
from deploy.charts import Rendered
from deploy.releases import named, release
from launch.experiment_cases import small_cells
from play_pods import UNFINISHED, run
from pods.machine import BACK_OFF_S, GONE, Machine
from pods.podman import Podman, PodmanError, State
from pods.translation import NotPlayable, Release

from dase_grpc.launch.experiments.kubernetes import CellsJob
from dase_grpc.launch.experiments.sites import KubernetesSite


def test_nothing_is_left_of_a_pod_that_does_not_start(tmp_path, monkeypatch):
    program = tmp_path / "podman"
    program.write_text(f'#!/bin/sh\necho "$1 $2" >> {tmp_path}/asked\n[ "$1" != start ]\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    manifest = {"metadata": {"name": "one"}, "spec": {"containers": [{"name": "own"}]}}
    with pytest.raises(PodmanError, match="podman start one-own"):
        Podman(tmp_path, "net").play(manifest, [], {})
    assert (tmp_path / "asked").read_text().splitlines() == ["kube play", "start one-own", "pod rm"]


class FakePodman:
    """Containers that end when they are told to, and that answer probes unless they are said not to."""

    def __init__(self) -> None:
        self.now = 0.0
        self.codes: dict[str, int | None] = {}
        self.sent: list[tuple[str, str]] = []
        self.dumb: set[str] = set()
        self.deaf: set[str] = set()

    def play(self, manifest, aliases, awaited) -> str:
        container = manifest["spec"]["containers"][-1]
        name = manifest["metadata"]["name"]
        self.codes[f"{name}-{container['name']}"] = None
        return name

    def states(self) -> Mapping[str, State]:
        return {name: State(code is not None, code or 0, 1) for name, code in self.codes.items()}

    def start(self, pod: str, container: str) -> str:
        self.codes[container] = None
        return pod

    def send(self, container: str, signal: str) -> None:
        self.sent.append((container, signal))
        if signal == "KILL":
            self.codes[container] = 137
        elif container not in self.deaf:
            self.codes[container] = 75 if "learner" in container else 0

    def logs(self, container: str) -> str:
        if container not in self.codes:
            raise PodmanError(f"no container {container}")
        return f"{container} wrote\n"

    def remove(self, pod: str) -> None:
        self.codes = {name: code for name, code in self.codes.items() if not name.startswith(pod)}

    def answers(self, url: str, timeout_s: float) -> bool:
        return not any(name in url for name in self.dumb)


@pytest.fixture
def podman() -> FakePodman:
    return FakePodman()


@pytest.fixture
def machine(podman: FakePodman, rendered: dict[str, Rendered], tmp_path: Path) -> Machine:
    made = release(rendered["plain"])
    machine = Machine(
        made, podman, tmp_path, say=lambda text: None, clock=lambda: podman.now, answers=podman.answers
    )
    for pod in made.pods():
        machine.play(pod)
    return machine


def after(machine: Machine, podman: FakePodman, seconds: float) -> None:
    podman.now += seconds
    machine.step()
    machine.step()


REPLAY = "run-dase-replay-0"


def learner(machine: Machine, agent: int = 0) -> str:
    (name,) = (
        each for each in [*machine.lives, *machine.codes] if "learner" in each and each.endswith(f"-{agent}")
    )
    return name


def end(machine: Machine, podman: FakePodman, name: str, code: int) -> None:
    podman.codes[machine.lives[name].container] = code
    machine.step()


def test_nobody_else_comes_at_the_files_of_volumes(rendered, podman, tmp_path):
    made = release(rendered["everything"])
    Machine(made, podman, tmp_path, say=lambda text: None).play(named(made, "replay-1"))
    volumes = tmp_path / "volumes"
    assert list(volumes.glob("*/tls/tls.key"))
    assert volumes.stat().st_mode & 0o777 == 0o700


def test_a_pod_is_ready_once_its_probes_of_start_and_readiness_have_passed(machine, podman):
    podman.dumb = {"/readyz"}
    after(machine, podman, 5)
    after(machine, podman, 5)
    assert machine.lives[REPLAY].probes["startupProbe"].passed
    assert not machine.lives[REPLAY].ready
    podman.dumb = set()
    after(machine, podman, 5)
    assert machine.lives[REPLAY].ready


def test_a_pod_whose_liveness_fails_too_often_is_told_to_end_and_started_again(machine, podman):
    after(machine, podman, 5)
    podman.dumb = {f"{REPLAY}:9500/healthz"}
    for _ in range(machine.lives[REPLAY].pod.container["livenessProbe"]["failureThreshold"]):
        after(machine, podman, 15)
    after(machine, podman, 20)
    assert (f"{REPLAY}-replay", "TERM") in podman.sent
    after(machine, podman, 0)
    assert podman.codes[f"{REPLAY}-replay"] is None
    assert not machine.lives[REPLAY].ready


def test_a_drained_replay_serves_on_for_its_time_and_comes_back_under_its_name(machine, podman):
    machine.drain(REPLAY)
    after(machine, podman, 19)
    assert podman.sent == []
    after(machine, podman, 1)
    assert podman.sent == [(f"{REPLAY}-replay", "TERM")]
    after(machine, podman, 0)
    assert machine.lives[REPLAY].kill_at is None
    assert machine.log(REPLAY) == 2 * f"{REPLAY}-replay wrote\n"


def test_what_does_not_end_within_its_grace_is_killed_once(machine, podman):
    podman.deaf = {f"{REPLAY}-replay"}
    machine.drain(REPLAY)
    after(machine, podman, 89)
    assert podman.sent == [(f"{REPLAY}-replay", "TERM")]
    after(machine, podman, 1)
    assert podman.sent == [(f"{REPLAY}-replay", "TERM"), (f"{REPLAY}-replay", "KILL")]


def test_what_crashes_again_and_again_is_started_again_ever_later(machine, podman):
    for pause in (0, BACK_OFF_S, 2 * BACK_OFF_S):
        end(machine, podman, REPLAY, 1)
        after(machine, podman, pause - 1)
        assert (podman.codes[f"{REPLAY}-replay"] is None) == (pause == 0)
        after(machine, podman, 1)
        assert podman.codes[f"{REPLAY}-replay"] is None


def test_a_job_is_complete_when_each_learner_has_ended_well(machine, podman):
    for agent in (0, 1):
        assert not machine.complete
        end(machine, podman, learner(machine, agent), 0)
    assert machine.complete
    assert not machine.given_up


def test_a_stopped_learner_is_replaced_however_often_and_one_that_fails_is_given_up(machine, podman):
    for _ in range(9):
        end(machine, podman, learner(machine), 75)
        after(machine, podman, 0)
    failing = learner(machine, 1)
    for _ in range(6):
        end(machine, podman, failing, 1)
        after(machine, podman, 400)
    assert not machine.given_up
    end(machine, podman, failing, 1)
    assert machine.given_up == {failing}
    assert machine.codes == {failing: 1}


@pytest.fixture
def cells(podman: FakePodman, tmp_path: Path) -> Machine:
    """An experiment's Job of four cells, two at once."""
    site = KubernetesSite(image="dase", claim="runs", at_once=2, retries=1)
    made = Release(tuple(CellsJob("e", "", small_cells(seed=[0, 1, 2, 3]), site).manifests()))
    machine = Machine(made, podman, tmp_path, say=lambda text: None, clock=lambda: podman.now)
    for pod in made.pods():
        machine.begin(pod)
    machine.step()
    return machine


def indices(names: Iterable[str]) -> set[str]:
    return {name.rpartition("-")[2] for name in names}


def cell(machine: Machine, index: int) -> str:
    (name,) = (name for name in machine.lives if name.endswith(f"-{index}"))
    return name


def test_a_job_runs_as_many_pods_at_once_as_it_may(cells, podman):
    assert indices(cells.lives) == {"0", "1"}
    end(cells, podman, cell(cells, 0), 0)
    assert indices(cells.lives) == {"1", "2"}
    end(cells, podman, cell(cells, 1), 1)
    assert indices(cells.lives) == {"2", "3"}
    end(cells, podman, cell(cells, 3), 0)
    assert indices(cells.lives) == {"1", "2"}
    for index in (1, 2):
        end(cells, podman, cell(cells, index), 0)
    assert cells.complete
    assert not cells.given_up


def test_a_cell_that_is_refused_is_given_up_at_once_and_one_that_stops_never(cells, podman):
    refused, stopped = cell(cells, 0), cell(cells, 1)
    end(cells, podman, refused, 2)
    assert (cells.given_up, cells.codes) == ({refused}, {refused: 2})
    for index in (2, 3):
        end(cells, podman, cell(cells, index), 0)
    for code in (75, 130, 75, 130, 137):  # the last one counts, and is tried again once
        end(cells, podman, stopped, code)
        assert stopped in cells.lives
    end(cells, podman, stopped, 137)
    assert cells.given_up == {refused, stopped}
    assert cells.complete


def test_a_learner_that_is_drained_and_killed_has_not_failed(machine, podman):
    name = learner(machine)
    podman.deaf = {machine.lives[name].container}
    for _ in range(9):
        machine.drain(name)
        after(machine, podman, 0)
        after(machine, podman, 150)
        after(machine, podman, 0)
        assert name in machine.lives
    assert not machine.given_up


def test_a_pod_that_leaves_already_is_not_told_twice(machine, podman):
    podman.deaf = {f"{REPLAY}-replay"}
    machine.drain(REPLAY)
    after(machine, podman, 20)
    machine.close()
    after(machine, podman, 20)
    assert podman.sent.count((f"{REPLAY}-replay", "TERM")) == 1


def test_when_the_release_is_closed_all_leave_and_nobody_comes_back(machine, podman):
    machine.close()
    after(machine, podman, 0)
    assert list(machine.lives) == [REPLAY]
    after(machine, podman, 20)
    assert machine.lives == {}
    assert machine.codes[REPLAY] == 0


def test_a_pod_that_somebody_removes_is_replaced_and_the_others_still_end_in_order(machine, podman):
    removed = learner(machine)
    podman.remove(removed)
    machine.step()
    assert removed in machine.lives
    podman.remove(REPLAY)
    machine.close()
    after(machine, podman, 20)
    assert machine.lives == {}
    assert machine.codes[REPLAY] == GONE
    assert machine.codes[removed] == 75


@pytest.mark.parametrize(
    "asked",
    [
        {"terminationGracePeriodSeconds": "soon"},
        {"volumes": [{"name": "files", "secret": {}}]},
        {"containers": [{"name": "own", "volumeMounts": [{"name": "none"}]}]},
        {"containers": [{"name": "own", "readinessProbe": {"httpGet": {"path": "/", "port": "none"}}}]},
    ],
)
def test_what_no_pod_can_be_made_of_is_refused_before_any_is_played(podman, tmp_path, asked):
    spec = {"containers": [{"name": "own"}]}
    pods = [
        {"kind": "Pod", "metadata": {"name": name}, "spec": more}
        for name, more in (("well", spec), ("ill", spec | asked))
    ]
    made = Release(tuple(pods))
    with pytest.raises(NotPlayable, match="pod ill is none that Kubernetes would take"):
        run(Machine(made, podman, tmp_path, say=lambda text: None), made, Event())
    assert podman.codes == {}


def test_what_failed_first_is_what_is_said(podman, rendered, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(play_pods, "EVERY_S", 0.0)
    made = release(rendered["plain"])
    errors = itertools.chain(
        [None, PodmanError("no space left")], itertools.repeat(PodmanError("no network"))
    )

    def states() -> Mapping[str, State]:
        if error := next(errors):
            raise error
        return {}

    podman.states = states
    with pytest.raises(PodmanError, match="no space left"):
        run(Machine(made, podman, tmp_path, say=lambda text: None), made, Event())
    assert "pods may be left: no network" in capsys.readouterr().out


def test_a_run_that_is_stopped_has_not_ended_well(podman, rendered, tmp_path, monkeypatch):
    monkeypatch.setattr(play_pods, "EVERY_S", 0.0)
    made, stop, clock = release(rendered["plain"]), Event(), itertools.count(0.0, 5.0)
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        stop.set()

    machine = Machine(made, podman, tmp_path, say=say, clock=clock.__next__, answers=podman.answers)
    assert run(machine, made, stop) == UNFINISHED
    assert sum(text.endswith("ended with code 75") for text in said) == 2
    assert not machine.lives
