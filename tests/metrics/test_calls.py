"""What a service's calls have been: histograms as Prometheus has them, and methods shown from the start."""

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from dase_grpc.metrics.calls import Calls, CallsCollector, Durations


def test_a_duration_counts_in_the_bucket_whose_bound_it_does_not_exceed():
    durations = Durations([0.1, 1.0])
    for seconds in (0.0, 0.1, 0.5, 1.0, 7.0):
        durations.observe(seconds)
    assert durations.read() == ([2, 2, 1], 8.6)


def test_what_is_read_does_not_change_any_more():
    durations = Durations([1.0])
    counts, _ = durations.read()
    durations.observe(0.5)
    assert counts == [0, 0]


def test_prometheus_sees_cumulative_buckets_their_count_and_their_sum():
    calls = Calls()
    for seconds in (0.0001, 0.003, 99.0):
        calls.requests("Insert").observe(seconds)
    registry = CollectorRegistry()
    registry.register(CallsCollector(calls, role="replay"))
    found = {
        (sample.name, sample.labels.get("le")): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
        if sample.labels.get("rpc") == "Insert"
    }
    name = "dase_replay_request_duration_seconds"
    assert found[f"{name}_bucket", "0.0001"] == 1
    assert found[f"{name}_bucket", "0.002"] == 1
    assert found[f"{name}_bucket", "0.005"] == 2
    assert found[f"{name}_bucket", "5.0"] == 2
    assert found[f"{name}_bucket", "+Inf"] == found[f"{name}_count", None] == 3
    assert found[f"{name}_sum", None] == 99.0031


def test_methods_are_shown_before_their_first_call():
    calls = Calls(iter(["Insert", "Sample"]))
    assert dict(calls.received_bytes) == dict(calls.sent_bytes) == {"Insert": 0, "Sample": 0}
