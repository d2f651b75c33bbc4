"""Metrics: base units, values, and an endpoint with probes that comes and goes without a trace."""

import http.client
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import get_args

import numpy as np
import pytest
from children import forked
from contracts.sentences import refuses
from patience import PATIENCE_S
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from replay.wire import services
from write_metrics import DISTILLED, learner_registry, registries, replay_registry

from dase_grpc.errors import AddressError
from dase_grpc.learning.envs.steps import Reason
from dase_grpc.metrics.buffer import ReplayCollector, ReplayCounts
from dase_grpc.metrics.endpoint import (
    LIVE_PATH,
    READY_PATH,
    Probes,
    make_registry,
    metrics_endpoint,
)
from dase_grpc.metrics.nodes import RESTART_REASONS, SKIP_REASONS, STAGES, LearnerMetrics
from dase_grpc.progress import MAX_PAIRED_AGENTS
from dase_grpc.replay.buffer.store import Traffic
from dase_grpc.replay.client.connection import Stream
from dase_grpc.replay.client.handoff import WaitReason


def series(registry: CollectorRegistry, name: str) -> dict[tuple[str, ...], float]:
    samples = (sample for family in registry.collect() for sample in family.samples)
    return {tuple(sample.labels.values()): sample.value for sample in samples if sample.name == name}


@pytest.mark.parametrize("role", registries())
def test_metrics_follow_prometheus_conventions_and_show_what_the_process_takes(role):
    registry = registries()[role]
    names = {family.name for family in text_string_to_metric_families(generate_latest(registry).decode())}
    assert {"process_resident_memory_bytes", "process_cpu_seconds"} <= names
    for family in registry.collect():
        if family.name.startswith("process_"):
            continue
        assert re.fullmatch(r"dase_[a-z]+(_[a-z]+)+|grpc_server_handled", family.name)
        assert family.documentation.endswith(".")
        words = family.name.split("_")
        assert not {"ms", "us", "milliseconds", "minutes", "kb", "mb", "mib", "percent", "count"} & set(words)
        assert family.type == "counter" or not family.name.endswith("_total")
        assert family.type != "histogram" or family.name.endswith("_seconds")
        for sample in family.samples:
            assert not sample.name.endswith("_created")
            assert not {"run", "run_id", "host", "actor", "episode", "instance", "job"} & set(sample.labels)
            assert family.type != "counter" or sample.name.endswith("_total")


def test_the_replays_counters_are_read_when_scraped():
    registry = replay_registry()
    for name, values in {
        "buffer_capacity_transitions": {(): 10},
        "buffer_bytes": {(): 480},
        "buffer_transitions": {("0",): 4, ("70",): 6},
        "policy_version": {("0",): 0, ("70",): 4_000},
        "inserted_transitions_total": {("0",): 9, ("70",): 8},
        "evicted_transitions_total": {("0",): 5, ("70",): 2},
        "rejected_transitions_total": {("0", "not_finite"): 0, ("70", "not_finite"): 3},
    }.items():
        assert series(registry, f"dase_replay_{name}") == values


def test_pairs_are_exported_only_among_the_first_agents():
    assert series(replay_registry(), "dase_replay_sampled_transitions_total") == {("0", "0"): 11}
    assert series(learner_registry(1), "dase_similarity_weight_ratio") == {("1", "0"): 0.25}
    assert series(learner_registry(MAX_PAIRED_AGENTS), "dase_similarity_weight_ratio") == {}


def test_a_learners_numbers_carry_its_agent_id():
    registry = learner_registry(5)
    assert series(registry, "dase_explorer_env_steps_total") == {("5",): 1}
    assert series(registry, "dase_learner_loss") == {("5", "critic"): 0.5}
    assert series(registry, "dase_learner_update_duration_seconds_count") == {
        ("5", "sample"): 1,
        **{("5", stage): 0 for stage in STAGES if stage != "sample"},
    }


def test_counters_by_reason_begin_at_zero_for_prometheus_does_not_see_their_first_step():
    registry = make_registry()
    metrics = LearnerMetrics(registry, 1)
    metrics.expect(streams=Stream, waits=WaitReason)
    for name, reasons in {
        "dase_learner_skipped_updates_total": SKIP_REASONS,
        "dase_explorer_refused_transitions_total": get_args(Reason),
        "dase_explorer_env_restarts_total": RESTART_REASONS,
        "dase_learner_waiting_seconds_total": list(WaitReason),
    }.items():
        assert series(registry, name) == {("1", reason): 0 for reason in reasons}
    assert series(registry, "dase_learner_reconnects_total") == {
        ("1", stream, "UNAVAILABLE"): 0 for stream in Stream
    }


def test_what_has_not_happened_has_no_time():
    registry = make_registry()
    metrics = LearnerMetrics(registry, 1, now=lambda: 12.5)
    metrics.similarity(1, 1.0)
    names = (
        "dase_similarity_last_update_timestamp_seconds",
        "dase_learner_checkpoint_last_success_timestamp_seconds",
    )
    assert [series(registry, name) for name in names] == [{}, {}]
    metrics.similarity(0, 0.5)
    metrics.checkpointed()
    assert [series(registry, name) for name in names] == [{("1",): 12.5}, {("1",): 12.5}]


@pytest.mark.slow
def test_no_number_of_agents_makes_more_than_64_by_64_series_of_pairs():
    traffic, owners = Traffic(), np.arange(200, dtype=np.int32)
    for agent in owners.tolist():
        traffic.count_sampled(agent, owners)
    assert traffic.sampled_total == 200 * 200
    registry = make_registry()
    registry.register(ReplayCollector(lambda: ReplayCounts(sampled=traffic.sampled)))
    assert len(series(registry, "dase_replay_sampled_transitions_total")) == 64 * 64


def test_what_was_not_measured_keeps_its_last_value_and_counts_add_up():
    registry = make_registry()
    metrics = LearnerMetrics(registry, 1)
    metrics.distillation.show(DISTILLED)
    metrics.distillation.show({**DISTILLED, "distilled_share": None, "confidence": 3.0})
    assert series(registry, "dase_distillation_states_ratio") == {("1",): 0.5}
    assert series(registry, "dase_distillation_confidence_ratio") == {("1",): 3.0}
    assert series(registry, "dase_distillation_missed_updates_total") == {("1",): 6}


def test_a_learner_that_does_not_distil_has_no_series_of_it():
    registry = make_registry()
    LearnerMetrics(registry, 1).updates.inc()
    samples = [sample.name for family in registry.collect() for sample in family.samples]
    assert not [name for name in samples if name.startswith("dase_distillation")]


def test_registries_are_independent():
    LearnerMetrics(make_registry(), 0).updates.inc()
    other = make_registry()
    LearnerMetrics(other, 0)
    assert series(other, "dase_learner_updates_total") == {("0",): 0}


@pytest.fixture
def free_port() -> int:
    return services.free_port()


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def servers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "serve_forever" in thread.name]


def got(port: int, path: str) -> tuple[int, str]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)) as client:
        client.request("GET", path)
        answer = client.getresponse()
        return answer.status, answer.read().decode()


@pytest.mark.slow
def test_an_endpoint_serves_while_its_block_runs_and_leaves_no_port_and_no_thread(free_port):
    with metrics_endpoint(replay_registry(), "127.0.0.1", free_port) as port:
        assert port == free_port
        assert len(servers()) == 1
        status, text = got(port, "/metrics")
        assert (status, 'dase_replay_inserted_transitions_total{agent_id="0"} 9.0' in text) == (200, True)
    assert servers() == []
    with socket.create_server(("127.0.0.1", free_port)):
        pass


@pytest.mark.slow
def test_a_node_lives_while_its_loop_turns_and_is_ready_only_in_the_block_in_which_it_works(free_port):
    turns = [True, False]
    health = Probes(lambda: turns.pop(0))
    with metrics_endpoint(make_registry(), "127.0.0.1", free_port, health) as port:
        assert got(port, LIVE_PATH) == (200, "alive\n")
        assert got(port, LIVE_PATH) == (503, "the event loop is stuck\n")
        assert got(port, READY_PATH) == (503, "not ready\n")
        with health.ready():
            assert got(port, READY_PATH) == (200, "ready\n")
        assert got(port, READY_PATH) == (503, "not ready\n")
        status, text = got(port, "/metrics")
        assert (status, "dase_build_info" in text) == (200, True)


def test_a_node_is_not_ready_after_an_error_in_its_work():
    health = Probes(lambda: True)
    with pytest.raises(RuntimeError), health.ready():
        raise RuntimeError
    assert not health.is_ready


@pytest.mark.slow
def test_a_port_is_free_again_although_what_an_environment_has_forked_lives_on(free_port):
    with ExitStack() as stack:
        with metrics_endpoint(make_registry(), "127.0.0.1", free_port):
            stack.enter_context(forked())
        with socket.socket() as taken:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(("127.0.0.1", free_port))
            taken.listen()


@pytest.mark.slow
def test_an_endpoint_is_gone_after_an_error_in_its_block(free_port):
    with pytest.raises(RuntimeError), metrics_endpoint(make_registry(), "127.0.0.1", free_port):
        raise RuntimeError
    assert servers() == []


def test_a_port_in_use_is_refused_with_what_to_do(busy_port):
    with (
        refuses(AddressError, f"127.0.0.1:{busy_port}", "in use", "0 for none"),
        metrics_endpoint(make_registry(), "127.0.0.1", busy_port),
    ):
        pass


def test_a_host_that_is_not_this_machine_is_refused(free_port):
    with refuses(AddressError, "192.0.2.1"), metrics_endpoint(make_registry(), "192.0.2.1", free_port):
        pass


def test_port_zero_is_off():
    with metrics_endpoint(make_registry(), "127.0.0.1", 0) as port:
        assert (port, servers()) == (None, [])
