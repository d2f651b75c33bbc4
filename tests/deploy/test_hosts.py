"""A run over seven hosts that are apart: 25 ms and one packet in a hundred between them, then partitions.

The hosts are network namespaces of this machine, each with an address of its own (scripts/hosts.py).
"""

import pytest
from deploy.cluster import METRICS, started
from deploy.deployed import expressions
from deploy.jobs import numbered_settings
from deploy.stored import wrong
from hosts import NoNamespaces, hosts

AGENTS = 2
DELAY_S, LOSS = 0.025, 0.01
LEARNERS = [f"learner-{agent}" for agent in range(AGENTS)]
ACTORS = [f"actor-{agent}" for agent in range(AGENTS)]
UPDATES = "dase_learner_updates_total"
NOT_HERE = ("dase-distillation:", "dase-learners: Evaluations")
"""Panels without series: no pair distils, and learners leave evaluations to the evaluator."""
LEASE_ENDED = "dase_replay_leases{state='expired'} > 0"

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.faults]


def _agent(name):
    return f"--agent={name.partition('-')[2]}"


@pytest.fixture
def cluster(tmp_path, prometheus_folder):
    settings = numbered_settings(tmp_path, agents=AGENTS, steps=10_000_000, pause_s=0.02)
    settings["eval"] = {"by": "evaluator", "every": 200, "episodes": 1, "max_episode_steps": 50}
    roles = {
        **{name: ("--role=learner", f"--run-dir={tmp_path / 'run'}", _agent(name)) for name in LEARNERS},
        **{name: ("--role=actor", _agent(name)) for name in ACTORS},
        "evaluator": ("--role=evaluator", f"--run-dir={tmp_path / 'run'}"),
    }
    try:
        with (
            hosts("replay", "prometheus", *roles, delay_s=DELAY_S, loss=LOSS) as made,
            started(made, tmp_path, settings, roles, prometheus_folder) as running,
        ):
            yield running
    except NoNamespaces as reason:
        pytest.skip(str(reason))


def steps_of(cluster, name):
    """How many steps an actor has taken."""
    return f'dase_explorer_env_steps_total{{instance="{cluster.hosts.addresses[name]}:{METRICS}"}}'


def cut_and_healed(cluster, name, metric, *, until, meanwhile):
    """Cuts a host off until something holds and others have worked on; heals it, and waits until it works."""
    cluster.hosts.tell(f"cut {name}")
    cluster.until(f'up{{instance="{cluster.hosts.addresses[name]}:{METRICS}"}} == 0')
    cluster.until(until)
    for other in meanwhile:
        cluster.grows(other)
    cluster.hosts.tell(f"heal {name}")
    cluster.grows(metric)


def test_a_run_over_hosts_that_are_apart_trains_is_monitored_and_survives_partitions(cluster, tmp_path):
    for agent in range(AGENTS):
        cluster.until(f"{UPDATES}{{agent_id='{agent}'}} > 100")
    for each in expressions(rate_interval="10s"):
        if each.usual and not each.where.startswith(NOT_HERE):
            cluster.until(each.text)
    carried, lost = (int(word) for word in cluster.hosts.tell("count").split()[1::2])
    assert 0.005 < lost / (carried + lost) < 0.02
    updates = [f"{UPDATES}{{agent_id='{agent}'}}" for agent in range(AGENTS)]
    for name in ACTORS:
        cluster.until(f"{steps_of(cluster, name)} > 100")
    cut_and_healed(cluster, "learner-1", updates[1], until=LEASE_ENDED, meanwhile=updates[:1])
    acted = [steps_of(cluster, name) for name in ACTORS]
    cut_and_healed(cluster, "actor-0", acted[0], until=f"{acted[1]} > 0", meanwhile=[*updates, acted[1]])
    cluster.grows("dase_evaluation_duration_seconds_count{job='dase-evaluator'}", by=1)
    cluster.end(*ACTORS, "evaluator")
    cluster.end(*LEARNERS)
    cluster.end("replay")
    explored = len(ACTORS) + len(LEARNERS)
    assert wrong(tmp_path / "data", tmp_path / "ledger", agents=AGENTS, environments=explored) == []
