"""A machine that runs a release: what controllers and a kubelet do with its pods, where a chart counts on it.

Pods are started, asked by their probes, started again or replaced when they end, told to end in the order
that Kubernetes keeps (on duty for the preStop sleep, SIGTERM, SIGKILL when the grace is over), and a Job is
over when each of its indices is.
"""

import math
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from pods.podman import State
from pods.translation import PROBES, Manifest, Pod, Release, accepted, files_of, playable
from pods.volumes import write_volume

BACK_OFF_S: Final = 10.0
"""What ends once is started again at once, then after as long, then after twice as long, and so on."""

MOST_BACK_OFF_S: Final = 300.0

GONE: Final = -1
"""In the place of an exit code that nobody has heard of."""


class Runtime(Protocol):
    """What runs containers; see `podman.Podman`."""

    def play(self, manifest: Manifest, aliases: Sequence[str], awaited: Mapping[str, Sequence[str]]) -> str:
        """Starts a pod's containers, each once what is awaited of the one before holds; its address."""

    def states(self) -> Mapping[str, State]:
        """All containers, by name."""

    def start(self, pod: str, container: str) -> str:
        """Starts a pod's container again that has ended; returns its address."""

    def send(self, container: str, signal: str) -> None:
        """Sends a signal to a container."""

    def logs(self, container: str) -> str:
        """What a container has written."""

    def remove(self, pod: str) -> None:
        """Forgets a pod."""


def answers(url: str, timeout_s: float) -> bool:
    """Whether a probe's URL answers with success in time; no proxy is asked."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=timeout_s) as answer:
            return bool(answer.status < 400)
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False


@dataclass
class Probe:
    """One probe of a container, and what its answers come to."""

    path: str
    port: int
    period_s: float
    timeout_s: float
    failure_threshold: int
    passed: bool = False
    failures: int = 0
    due_at: float = 0.0

    @staticmethod
    def of(manifest: Manifest, ports: Mapping[str, int]) -> "Probe":
        """A probe as a container declares it; what it leaves out is as in Kubernetes."""
        port = manifest["httpGet"]["port"]
        return Probe(
            manifest["httpGet"]["path"],
            ports[port] if isinstance(port, str) else port,
            float(manifest.get("periodSeconds", 10)),
            float(manifest.get("timeoutSeconds", 1)),
            int(manifest.get("failureThreshold", 3)),
        )

    @property
    def failed(self) -> bool:
        """Whether it has failed as often in a row as it may."""
        return self.failures >= self.failure_threshold

    def note(self, answered: bool, now: float) -> None:
        """Counts an answer."""
        self.due_at = now + self.period_s
        self.failures = 0 if answered else self.failures + 1
        self.passed = answered or (self.passed and not self.failed)


@dataclass
class Life:
    """A pod that is there.

    Attributes:
        address: where it is on the network.
        drained: it has been told to leave, so its end is nobody's failure.
        tell_at, kill_at: when its container gets SIGTERM and SIGKILL; None while it may run.
        again_at: when its container, which has ended, is started again.
    """

    pod: Pod
    address: str
    probes: dict[str, Probe] = field(default_factory=dict)
    drained: bool = False
    tell_at: float | None = None
    kill_at: float | None = None
    again_at: float | None = None

    def __post_init__(self) -> None:
        self.forget_probes()

    def forget_probes(self) -> None:
        """Begins to probe anew, as with a new container."""
        ports = {port["name"]: port["containerPort"] for port in self.pod.container.get("ports", [])}
        declared = {kind: self.pod.container.get(kind) for kind in PROBES}
        self.probes = {kind: Probe.of(each, ports) for kind, each in declared.items() if each}

    @property
    def container(self) -> str:
        """What podman calls its container."""
        return f"{self.pod.name}-{self.pod.container['name']}"

    @property
    def ready(self) -> bool:
        """Whether it is started and its readiness probe has passed, as far as it has these."""
        asked = (self.probes.get(kind) for kind in ("startupProbe", "readinessProbe"))
        return self.again_at is None and all(probe is None or probe.passed for probe in asked)

    def due(self, now: float) -> list[Probe]:
        """Whom to ask by now; no other probe before the one of the start has passed."""
        startup = self.probes.get("startupProbe")
        if startup is not None and not startup.passed:
            wanted = [startup]
        else:
            wanted = [self.probes[kind] for kind in PROBES[1:] if kind in self.probes]
        return [probe for probe in wanted if probe.due_at <= now]

    @property
    def unwell(self) -> bool:
        """Whether a probe that decides about its life has failed too often."""
        return any(self.probes[kind].failed for kind in PROBES[:2] if kind in self.probes)

    def end(self, now: float) -> None:
        """Decides that its container ends: told after its time on duty, and before its grace is over."""
        if self.kill_at is None:
            self.tell_at, self.kill_at = now + self.pod.on_duty_s, now + self.pod.grace_s


class Machine:
    """Runs the pods of one release; `step` does whatever is due, and nothing happens in between.

    Attributes:
        lives: the pods that are there, by name.
        codes: the exit codes of pods that are over and that nothing replaces, by name.
        given_up: of those, the pods of Jobs that failed too often.
    """

    def __init__(
        self,
        release: Release,
        runtime: Runtime,
        folder: Path,
        *,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        answers: Callable[[str, float], bool] = answers,
    ) -> None:
        self.lives: dict[str, Life] = {}
        self.codes: dict[str, int] = {}
        self.given_up: set[str] = set()
        self._release, self._runtime, self._folder = release, runtime, folder
        self._say, self._clock, self._answers = say, clock, answers
        self._jobs = {pod.name for pod in release.pods() if pod.owner.startswith("Job/")}
        self._failures: Counter[str] = Counter()
        self._waiting: dict[str, tuple[Pod, float]] = {}
        self._closing = False

    def begin(self, pod: Pod) -> None:
        """Plays a pod at the next step; one of a Job that runs as many as it may, once there is room.

        Raises:
            NotPlayable: something will be asked of its manifest that it does not say, or not so.
        """
        with accepted(f"pod {pod.name}"):
            self._try_out(pod)
        self._waiting[pod.name] = (pod, self._clock())

    def _try_out(self, pod: Pod) -> None:
        """Reads all that will be read of a pod's manifest and of its Job's."""
        playable(pod, {})
        Life(pod, "").end(0.0)
        for volume in pod.spec.get("volumes", []):
            files_of(volume, self._release)
        for action in ("Ignore", "FailIndex") if pod.name in self._jobs else ():
            self._codes(pod, action)

    def play(self, pod: Pod) -> None:
        """Writes the volumes of a pod and starts it."""
        folders = self._written(pod)
        probes = {each["name"]: each.get("startupProbe") for each in pod.sidecars}
        awaited = {name: probe["exec"]["command"] for name, probe in probes.items() if probe}
        address = self._runtime.play(playable(pod, folders), pod.aliases, awaited)
        self.lives[pod.name] = Life(pod, address)
        self._say(f"{pod.name}: started, {address}")

    def renew(self, release: Release) -> None:
        """Brings what Secrets and ConfigMaps hold by now into the pods that are there, as a kubelet does."""
        self._release = release
        for life in self.lives.values():
            self._written(life.pod)

    def _written(self, pod: Pod) -> dict[str, Path]:
        """Writes a pod's volumes of files; where each lies. Nobody but root comes at them past the pods."""
        volumes = self._folder / "volumes"
        volumes.mkdir(mode=0o700, parents=True, exist_ok=True)
        group = pod.spec.get("securityContext", {}).get("fsGroup")
        files = {each["name"]: files_of(each, self._release) for each in pod.spec.get("volumes", [])}
        return {
            name: write_volume(volumes / pod.name / name, each, group=group)
            for name, each in files.items()
            if each is not None
        }

    def drain(self, name: str) -> None:
        """Has a pod leave as when its node is drained; its controller makes another."""
        self.lives[name].drained = True
        self.lives[name].end(self._clock())

    def kill(self, name: str) -> None:
        """Kills a pod's container."""
        self._runtime.send(self.lives[name].container, "KILL")

    def close(self) -> None:
        """Has all pods leave, as `helm uninstall` does, and none be replaced."""
        self._closing = True
        self._waiting.clear()
        for name in self.lives:
            self.drain(name)

    @property
    def complete(self) -> bool:
        """Whether every index of every Job is over, in one way or the other; never where there is no Job."""
        return bool(self._jobs) and self._jobs <= set(self.codes)

    def step(self) -> None:
        """Does what is due."""
        states, now = self._runtime.states(), self._clock()
        probed = []
        for life in list(self.lives.values()):
            state = states.get(life.container)
            if state is None:
                self._gone(life, now)
            elif state.ended:
                self._ended(life, state.exit_code, now)
            elif life.kill_at is not None:
                self._end(life, now)
            else:
                probed.append(life)
        self._probe(probed, now)
        for name, (pod, at) in list(self._waiting.items()):
            if at <= now and self._has_room(pod):
                del self._waiting[name]
                self.play(pod)

    def log(self, name: str) -> str:
        """What all containers of a pod's name have written, those of its former lives included."""
        path = self._log(name)
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        return before + (self._runtime.logs(self.lives[name].container) if name in self.lives else "")

    def _log(self, name: str) -> Path:
        return self._folder / "logs" / f"{name}.log"

    def _probe(self, lives: Sequence[Life], now: float) -> None:
        """Asks all probes that are due, side by side, for one that does not answer takes its time."""
        were_ready = [life.ready for life in lives]
        asked = [
            (f"http://{life.address}:{each.port}{each.path}", each)
            for life in lives
            for each in life.due(now)
        ]
        with ThreadPoolExecutor(max_workers=max(1, len(asked))) as threads:
            answered = threads.map(lambda pair: self._answers(pair[0], pair[1].timeout_s), asked)
            for (_, probe), answer in zip(asked, answered, strict=True):
                probe.note(answer, now)
        for life, was_ready in zip(lives, were_ready, strict=True):
            if life.ready != was_ready:
                self._say(f"{life.pod.name}: {'ready' if life.ready else 'not ready any more'}")
            if life.unwell:
                self._say(f"{life.pod.name}: does not answer its probes, so it is ended")
                life.end(now)

    def _end(self, life: Life, now: float) -> None:
        if life.tell_at is not None and life.tell_at <= now:
            life.tell_at = None
            self._runtime.send(life.container, "TERM")
        if life.kill_at is not None and life.kill_at <= now:
            self._say(f"{life.pod.name}: has not ended within its {life.pod.grace_s:g} s, so it is killed")
            self._runtime.send(life.container, "KILL")
            life.kill_at = math.inf

    def _ended(self, life: Life, code: int, now: float) -> None:
        """A container has ended: it is started again, replaced, or over."""
        pod = life.pod
        if life.again_at is None:
            self._say(f"{pod.name}: ended with code {code}")
        if pod.always and not life.drained:
            self._start_again(life, now)
            return
        self._forget(life)
        if self._closing or not pod.owner or (code == 0 and not pod.always):
            self.codes[pod.name] = code
        elif pod.always or life.drained or code in self._codes(pod, "Ignore"):
            self._waiting[pod.name] = (pod, now)
        elif code in self._codes(pod, "FailIndex") or self._failures[pod.name] >= self._limit(pod):
            self.codes[pod.name] = code
            self.given_up.add(pod.name)
        else:
            self._waiting[pod.name] = (pod, now + self._back_off(pod.name))

    def _gone(self, life: Life, now: float) -> None:
        """Somebody has removed a pod past this machine: it is replaced, and has not failed."""
        pod = life.pod
        self._say(f"{pod.name}: is not there any more")
        self._runtime.remove(pod.name)
        del self.lives[pod.name]
        if self._closing or not pod.owner:
            self.codes[pod.name] = GONE
        else:
            self._waiting[pod.name] = (pod, now)

    def _start_again(self, life: Life, now: float) -> None:
        if life.again_at is None:
            life.again_at = now + self._back_off(life.pod.name)
        if life.again_at <= now:
            life.address = self._runtime.start(life.pod.name, life.container)
            life.again_at = life.tell_at = life.kill_at = None
            life.forget_probes()
            self._say(f"{life.pod.name}: started again, {life.address}")

    def _back_off(self, name: str) -> float:
        """How long what has failed once more waits for its next start."""
        before, self._failures[name] = self._failures[name], self._failures[name] + 1
        return min(BACK_OFF_S * 2 ** (before - 1), MOST_BACK_OFF_S) if before else 0.0

    def _forget(self, life: Life) -> None:
        """Keeps what a pod has written, and removes it."""
        path = self._log(life.pod.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as log:
            log.write(self._runtime.logs(life.container))
        self._runtime.remove(life.pod.name)
        del self.lives[life.pod.name]

    def _has_room(self, pod: Pod) -> bool:
        """Whether the Job that a pod is of, if any, may run one more."""
        if pod.name not in self._jobs:
            return True
        running = sum(life.pod.owner == pod.owner for life in self.lives.values())
        return running < int(self._job(pod).get("parallelism", 1))

    def _codes(self, pod: Pod, action: str) -> set[int]:
        """Exit codes for which a pod's Job has an action: Ignore does not count them, FailIndex gives up."""
        rules = self._job(pod).get("podFailurePolicy", {}).get("rules", [])
        exits = [rule["onExitCodes"] for rule in rules if rule["action"] == action and "onExitCodes" in rule]
        return {code for each in exits if each["operator"] == "In" for code in each["values"]}

    def _limit(self, pod: Pod) -> int:
        return int(self._job(pod).get("backoffLimitPerIndex", 6))

    def _job(self, pod: Pod) -> Manifest:
        kind, _, name = pod.owner.partition("/")
        return dict(self._release.named(kind, name)["spec"])
