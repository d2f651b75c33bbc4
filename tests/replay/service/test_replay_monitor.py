"""What a replay node shows Prometheus, read as a scrape does."""

import pytest
from replay.wire.services import SCHEMA, rows_of

from dase_grpc.nodes.replay import DESCRIPTORS
from dase_grpc.replay.buffer.run import SharedRun
from dase_grpc.replay.service.monitor import ReplayMonitor


@pytest.fixture
def run() -> SharedRun:
    return SharedRun("the-run", capacity=10, min_size=1, seed=7, ttl_s=10.0)


def shown(monitor: ReplayMonitor, name: str, **labels: str) -> float | None:
    return monitor.registry.get_sample_value(name, labels)


def test_before_the_first_join_there_are_no_agents_and_no_bytes(run):
    monitor = ReplayMonitor(run, DESCRIPTORS)
    assert shown(monitor, "dase_replay_leases", state="live") == 0
    assert shown(monitor, "dase_replay_buffer_bytes") == 0
    assert shown(monitor, "dase_replay_received_bytes_total", rpc="Insert") == 0
    assert shown(monitor, "dase_replay_sent_bytes_total", rpc="Subscribe") == 0


def test_leases_are_counted_by_state_and_by_agent_how_often_they_were_granted(run):
    monitor = ReplayMonitor(run, DESCRIPTORS)
    for wanted, now in ((0, 0.0), (0, 100.0), (1, 0.0)):  # long ago by the clock of a scrape
        run.join("node", wanted=wanted, run_id="", schema=SCHEMA, now=now)
    run.leases.leave(1, 1, because="done")
    assert shown(monitor, "dase_replay_leases", state="left") == 1
    assert shown(monitor, "dase_replay_leases_granted_total", agent_id="0") == 2
    assert shown(monitor, "dase_replay_leases_granted_total", agent_id="1") == 1


def test_what_the_buffer_holds_is_counted_in_transitions_and_bytes(run):
    monitor = ReplayMonitor(run, DESCRIPTORS, open_streams=lambda: {"Insert": 1})
    run.join("node", wanted=0, run_id="", schema=SCHEMA, now=0.0)
    run.store.append("w", 1, rows_of(1, 12), agent_id=0)
    assert shown(monitor, "dase_replay_buffer_transitions", agent_id="0") == 10
    assert shown(monitor, "dase_replay_buffer_bytes") == 10 * SCHEMA.row_bytes
    assert shown(monitor, "dase_replay_evicted_transitions_total", agent_id="0") == 2
    assert shown(monitor, "dase_replay_active_streams", rpc="Insert") == 1


def test_a_buffer_in_memory_has_no_time_of_a_sync_and_one_on_disk_has(run):
    monitor = ReplayMonitor(run, DESCRIPTORS)
    assert shown(monitor, "dase_replay_last_sync_timestamp_seconds") is None
    run.join("node", wanted=0, run_id="", schema=SCHEMA, now=0.0)
    monitor.synced(1_700_000_000.5)
    assert shown(monitor, "dase_replay_last_sync_timestamp_seconds") == 1_700_000_000.5
