"""Metrics: the names of the table, base units, and an endpoint that comes and goes without a trace."""

import http.client
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import get_args

import pytest
from children import forked
from contracts.sentences import assert_one_sentence
from patience import PATIENCE_S
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from write_metrics import DISTILLED, learner_registry, replay_registry

from dase_grpc.errors import AddressError
from dase_grpc.learning.envs.explorer import Reason
from dase_grpc.metrics.buffer import ReplayCollector, ReplayCounts
from dase_grpc.metrics.endpoint import MAX_PAIRED_AGENTS, make_registry, metrics_endpoint
from dase_grpc.metrics.nodes import RESTART_REASONS, SKIP_REASONS, STAGES, LearnerMetrics
from dase_grpc.replay.client.connection import Stream
from dase_grpc.replay.client.waits import WaitReason

C, G, H = "counter", "gauge", "histogram"
EVERY_ROLE = {
    "dase_build_info": (G, {"version", "python"}),
    "dase_event_loop_lag_seconds": (H, set()),
}
REPLAY = EVERY_ROLE | {
    "dase_replay_inserted_transitions_total": (C, {"agent_id"}),
    "dase_replay_evicted_transitions_total": (C, {"agent_id"}),
    "dase_replay_rejected_transitions_total": (C, {"agent_id", "reason"}),
    "dase_replay_sampled_transitions_total": (C, {"agent_id", "source_agent_id"}),
    "dase_replay_buffer_transitions": (G, {"agent_id"}),
    "dase_replay_policy_version": (G, {"agent_id"}),
    "dase_replay_active_streams": (G, {"rpc"}),
    "dase_replay_denied_calls_total": (C, {"reason"}),
    "dase_replay_buffer_capacity_transitions": (G, set()),
    "dase_replay_buffer_bytes": (G, set()),
    "dase_replay_request_duration_seconds": (H, {"rpc"}),
    "dase_replay_sample_wait_seconds": (H, set()),
    "dase_replay_received_bytes_total": (C, {"rpc"}),
    "dase_replay_sent_bytes_total": (C, {"rpc"}),
    "dase_replay_last_sync_timestamp_seconds": (G, set()),
    "dase_replay_leases": (G, {"state"}),  # beyond the table
    "dase_replay_leases_granted_total": (C, {"agent_id"}),  # beyond the table
    "grpc_server_handled_total": (C, {"grpc_method", "grpc_type", "grpc_code"}),
}
LEARNER = EVERY_ROLE | {
    "dase_learner_updates_total": (C, {"agent_id"}),
    "dase_learner_update_duration_seconds": (H, {"agent_id", "stage"}),
    "dase_learner_loss": (G, {"agent_id", "loss"}),
    "dase_learner_skipped_updates_total": (C, {"agent_id", "reason"}),
    "dase_similarity_weight_ratio": (G, {"agent_id", "source_agent_id"}),
    "dase_similarity_pooled_weight_ratio": (G, {"agent_id"}),
    "dase_similarity_divergence_nats": (G, {"agent_id", "term"}),
    "dase_similarity_source_divergence_nats": (G, {"agent_id", "source_agent_id", "term"}),
    "dase_similarity_external_share_ratio": (G, {"agent_id"}),
    "dase_distillation_states_ratio": (G, {"agent_id"}),
    "dase_distillation_confidence_ratio": (G, {"agent_id"}),
    "dase_distillation_peer_lag_updates": (G, {"agent_id"}),
    "dase_distillation_missed_updates_total": (C, {"agent_id"}),
    "dase_distillation_refused_policies_total": (C, {"agent_id"}),
    "dase_similarity_effective_batch_transitions": (G, {"agent_id"}),
    "dase_explorer_env_steps_total": (C, {"agent_id"}),
    "dase_explorer_episodes_total": (C, {"agent_id"}),
    "dase_explorer_episode_return": (G, {"agent_id"}),
    "dase_explorer_unacknowledged_transitions": (G, {"agent_id"}),
    "dase_explorer_acknowledged_transitions_total": (C, {"agent_id"}),  # beyond the table
    "dase_explorer_refused_transitions_total": (C, {"agent_id", "reason"}),  # beyond the table
    "dase_explorer_env_restarts_total": (C, {"agent_id", "reason"}),
    "dase_explorer_policy_lag_updates": (G, {"agent_id"}),
    "dase_learner_sample_age_updates": (G, {"agent_id"}),  # beyond the table
    "dase_learner_prefetched_batches": (G, {"agent_id"}),
    "dase_learner_gpu_memory_bytes": (G, {"agent_id"}),
    "dase_learner_checkpoint_last_success_timestamp_seconds": (G, {"agent_id"}),
    "dase_similarity_last_update_timestamp_seconds": (G, {"agent_id"}),
    "dase_learner_reconnects_total": (C, {"agent_id", "stream", "grpc_code"}),
    "dase_learner_waiting_seconds_total": (C, {"agent_id", "reason"}),
    "dase_learner_replay_losses_total": (C, {"agent_id"}),
    "dase_evaluation_return_mean": (G, {"agent_id"}),
    "dase_evaluation_duration_seconds": (H, {"agent_id"}),
}


def exported(registry: CollectorRegistry) -> dict[str, tuple[str, set[str]]]:
    """Type and label names of each family in Prometheus' text, by the name under which it is queried."""
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        name = family.name + ("_total" if family.type == C else "")
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        found[name] = (family.type, labels)
    return found


def series(registry: CollectorRegistry, name: str) -> dict[tuple[str, ...], float]:
    samples = (sample for family in registry.collect() for sample in family.samples)
    return {tuple(sample.labels.values()): sample.value for sample in samples if sample.name == name}


@pytest.mark.parametrize(
    ("registry", "table"),
    [(replay_registry(), REPLAY), (learner_registry(), LEARNER)],
    ids=["replay", "learner"],
)
def test_a_role_exports_the_names_types_and_labels_of_the_table(registry, table):
    found = exported(registry)
    assert {name: found[name] for name in found if not name.startswith("process_")} == table


def test_each_role_shows_what_its_process_takes():
    for registry in (replay_registry(), learner_registry()):
        assert {"process_resident_memory_bytes", "process_cpu_seconds_total"} <= set(exported(registry))


@pytest.mark.parametrize("registry", [replay_registry(), learner_registry()], ids=["replay", "learner"])
def test_metrics_follow_prometheus_conventions(registry):
    for family in registry.collect():
        if family.name.startswith("process_"):
            continue
        assert re.fullmatch(r"dase_[a-z]+(_[a-z]+)+|grpc_server_handled", family.name)
        assert family.documentation.endswith(".")
        words = family.name.split("_")
        assert not {"ms", "us", "milliseconds", "minutes", "kb", "mb", "mib", "percent", "count"} & set(words)
        assert family.type == C or not family.name.endswith("_total")
        assert family.type != H or family.name.endswith("_seconds")
        for sample in family.samples:
            assert not sample.name.endswith("_created")
            assert not {"run", "run_id", "host", "actor", "episode", "instance", "job"} & set(sample.labels)
            assert family.type != C or sample.name.endswith("_total")


def test_the_replays_counters_are_read_when_scraped():
    registry = replay_registry()
    assert series(registry, "dase_replay_buffer_capacity_transitions") == {(): 10}
    assert series(registry, "dase_replay_buffer_bytes") == {(): 480}
    assert series(registry, "dase_replay_buffer_transitions") == {("0",): 4, ("70",): 6}
    assert series(registry, "dase_replay_policy_version") == {("0",): 0, ("70",): 4_000}
    assert series(registry, "dase_replay_inserted_transitions_total") == {("0",): 9, ("70",): 8}
    assert series(registry, "dase_replay_evicted_transitions_total") == {("0",): 5, ("70",): 2}
    assert series(registry, "dase_replay_rejected_transitions_total") == {
        ("0", "not_finite"): 0,
        ("70", "not_finite"): 3,
    }


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


def test_no_number_of_agents_makes_more_than_64_by_64_series_of_pairs():
    agents = range(200)
    pairs = {(agent, source): 1 for agent in agents for source in agents}
    registry = make_registry()
    registry.register(ReplayCollector(lambda: ReplayCounts(sampled=pairs)))
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
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def servers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "serve_forever" in thread.name]


@pytest.mark.slow
def test_an_endpoint_serves_while_its_block_runs_and_leaves_no_port_and_no_thread(free_port):
    with metrics_endpoint(replay_registry(), "127.0.0.1", free_port) as port:
        assert port == free_port
        assert len(servers()) == 1
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
        client.request("GET", "/metrics")
        answer = client.getresponse()
        assert answer.status == 200
        assert b'dase_replay_inserted_transitions_total{agent_id="0"} 9.0' in answer.read()
        client.close()
    assert servers() == []
    with socket.create_server(("127.0.0.1", free_port)):
        pass


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
    with pytest.raises(AddressError) as refusal, metrics_endpoint(make_registry(), "127.0.0.1", busy_port):
        pass
    assert_one_sentence(refusal.value, f"127.0.0.1:{busy_port}", "in use", "0 for none")


def test_a_host_that_is_not_this_machine_is_refused(free_port):
    with pytest.raises(AddressError) as refusal, metrics_endpoint(make_registry(), "192.0.2.1", free_port):
        pass
    assert_one_sentence(refusal.value, "192.0.2.1")


def test_port_zero_is_off():
    with metrics_endpoint(make_registry(), "127.0.0.1", 0) as port:
        assert port is None
        assert servers() == []
