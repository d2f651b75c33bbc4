"""The chart's pods run: podman plays them here, and they are killed and drained while they train."""

import base64
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

import pytest
import tomli_w
from deploy.charts import Helm
from deploy.imaging import Builder
from deploy.jobs import numbered_settings
from deploy.monitor import scrape_config
from deploy.playing import GROUP, Played, alone_with_podman, observer, release_of, secret
from deploy.servers import free_ports, prometheus, running
from deploy.stored import wrong
from pods.machine import Machine
from pods.podman import Podman
from pods.translation import Release

from dase_grpc.replay.security.certificates import make_authority

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.faults, pytest.mark.timeout(1800)]

AGENTS = 2
REPLAY = "run-dase-replay-0"
ADDRESS = f"{REPLAY}.run-dase-replay:50051"
ACTORS = [f"run-dase-actor-{agent}-0" for agent in range(AGENTS)]
EVALUATOR = "run-dase-evaluator-0"
NODES = (
    "replay",
    *(f"{role}-{agent}" for role in ("learner", "actor") for agent in range(AGENTS)),
    "evaluator",
)


VALUES = (
    "image.repository=localhost/dase,image.tag=full",
    "replay.image.repository=localhost/dase,replay.image.tag=replay",
    "replay.capacity=100000,replay.minSize=100",
    "actors.perAgent=1,evaluator.enabled=true,metrics.podMonitor.enabled=true",
)


@pytest.fixture
def podman(builder: Builder, tmp_path: Path) -> Iterator[Podman]:
    with alone_with_podman(builder, tmp_path / "played", "replay", "full") as made:
        yield made


@pytest.fixture
def release(helm: Helm, tmp_path: Path) -> Release:
    settings = numbered_settings(tmp_path, agents=AGENTS, steps=4_000, pause_s=0.03)
    settings["env"]["kwargs"]["ledger"] = "/ledger"
    settings["eval"] = {"by": "evaluator", "every": 500, "episodes": 1, "max_episode_steps": 50}
    ledger = tmp_path / "ledger"
    ledger.mkdir()
    shutil.chown(ledger, GROUP, GROUP)
    config = tomli_w.dumps(settings).replace(",", r"\,")
    manifests = helm.rendered(*VALUES, config=config).manifests
    make_authority(tmp_path / "certs", now=datetime.now(UTC))
    hosts = {"replay": [ADDRESS.partition(":")[0]]}
    made = [secret(tmp_path / "certs", node, hosts.get(node, [])) for node in NODES]
    return release_of(manifests, made, ledger)


@pytest.fixture
def played(podman: Podman, release: Release, prometheus_folder: Path, tmp_path: Path) -> Iterator[Played]:
    (monitor,) = release.of("PodMonitor")
    (tmp_path / "prometheus.yml").write_text(scrape_config(monitor), encoding="utf-8")
    observer(tmp_path / "certs", tmp_path)
    own = f"127.0.0.1:{free_ports(1)}"
    with ExitStack() as stack:
        stack.enter_context(running(prometheus(prometheus_folder, own), tmp_path, "prometheus"))
        machine = Machine(release, podman, tmp_path, say=print)
        made = Played(machine, podman, tmp_path, f"http://{own}")
        for pod in release.pods():
            machine.play(pod)
        yield made


def learners(played: Played) -> list[str]:
    return sorted(name for name in played.machine.lives if "-learner-" in name)


def test_a_run_in_pods_trains_is_watched_and_loses_nothing_however_its_pods_end(played, release, tmp_path):
    first, second = learners(played)
    explorers = (first, second, *ACTORS)
    played.until_ready(*(pod.name for pod in release.pods()))
    passes_helms_test(played, release)
    watched_as_told(played)
    begun = {name: played.note(name) for name in explorers}

    played.machine.kill(REPLAY)
    played.machine.kill(second)
    played.until(lambda: not played.machine.lives[REPLAY].ready, "the replay is gone")
    played.until_ready(REPLAY, second)
    for name in explorers:
        played.note(name)

    drained(played, REPLAY, first)
    played.until_ready(REPLAY, *explorers, EVALUATOR)
    noted = {name: played.note(name) for name in explorers}

    follows_a_renewal(played, release, tmp_path / "certs", second)
    played.until(lambda: played.machine.complete, "the run ends")
    assert [played.machine.codes[name] for name in (first, second)] == [0, 0]
    at_the_end_as_told(played)
    played.machine.close()
    played.until(lambda: not played.machine.lives, "all have ended")
    assert "Traceback" not in played.said()
    found = wrong(
        played.claim(f"data-{REPLAY}") / "replay",
        tmp_path / "ledger",
        agents=AGENTS,
        environments=len({*begun.values(), *noted.values()}),
        resumed=[noted[name] for name in (first, second)],
        lossy=[begun[name] for name in (second, *ACTORS)],
        acknowledged=played.acknowledged,
    )
    assert found == []
    assert len({*begun.values(), *noted.values()}) == len(ACTORS) + 2 * AGENTS


def passes_helms_test(played: Played, release: Release) -> None:
    (test,) = release.tests()
    played.machine.play(test)
    played.until(lambda: test.name in played.machine.codes, "helm test")
    assert played.machine.codes[test.name] == 0, played.machine.log(test.name)


def follows_a_renewal(played: Played, release: Release, certificates: Path, name: str) -> None:
    """A learner's new certificate comes to it while it runs, and nobody else's ever does."""
    renewed = secret(certificates, f"learner-{name[-1]}", replace=True)
    others = (each for each in release.manifests if each["metadata"] != renewed["metadata"])
    played.machine.renew(Release((*others, renewed)))
    crt = base64.b64decode(renewed["data"]["tls.crt"]).decode()
    played.until(lambda: played.within(name, "cat", "/etc/dase/tls/tls.crt") == crt, "the new certificate")
    assert "agents" not in played.within(name, "ls", "/").split()
    assert sorted(played.within(name, "ls", "/etc/dase/tls").split()) == sorted(renewed["data"])


def drained(played: Played, *names: str) -> None:
    """Drains pods, all at once; returns when others have taken their places."""
    lives = played.machine.lives
    before = {name: lives[name] for name in names}
    for name in names:
        played.machine.drain(name)
    played.until(lambda: all(lives.get(name) is not life for name, life in before.items()), "all have left")


def told(played: Played) -> dict[str, float]:
    """What `dase status` says of stored transitions and updates by agent, and of steps by actor."""
    status = played.status(ADDRESS)
    found = {f"{agent} stored": size for agent, size in status["buffer"]["size_by_agent"].items()}
    found |= {f"{agent['agent_id']} updates": agent["updates"] for agent in status["agents"]}
    actors = (node for node in status["nodes"] if node["role"] == "actor")
    return found | {f"{node['node_name'].partition('@')[2]} steps": node["env_steps"] for node in actors}


def scraped(played: Played) -> dict[str, float]:
    """The same, by what Prometheus has scraped."""
    names = {
        "stored": ("agent_id", "dase_replay_buffer_transitions{job='dase-replay'}"),
        "updates": ("agent_id", "dase_learner_updates_total{job='dase-learner'}"),
        "steps": ("instance", "dase_explorer_env_steps_total{job='dase-actor'}"),
    }
    return {
        f"{which} {name}": value
        for name, (label, expression) in names.items()
        for which, value in played.by(label, expression).items()
    }


def watched_as_told(played: Played) -> None:
    """What Prometheus knows lies between what `dase status` says before, and at last."""
    for agent in range(AGENTS):
        played.until_series(f"dase_learner_updates_total{{agent_id='{agent}'}} > 100")
    before, now = told(played), time.time()
    played.until_series(f"min(timestamp(dase_build_info{{run='run'}})) > {now}")
    jobs = {"dase-replay": 1, "dase-learner": AGENTS, "dase-actor": AGENTS, "dase-evaluator": 1}
    assert played.by("job", "count by (job) (up == 1)") == jobs
    between = scraped(played)
    assert before.keys() == between.keys()
    assert all(before[name] <= between[name] for name in before), (before, between)
    played.until(lambda: all(value <= told(played)[name] for name, value in between.items()), str(between))


def at_the_end_as_told(played: Played) -> None:
    """Nothing is stored any more, and both say how much is."""
    stored = {name: size for name, size in told(played).items() if name.endswith("stored")}
    assert stored.keys() == {f"{agent} stored" for agent in range(AGENTS)}
    played.until(lambda: stored.items() <= scraped(played).items(), f"Prometheus says {stored}")
