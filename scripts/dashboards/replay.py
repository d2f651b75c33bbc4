"""The replay service: what comes in, what goes out, how long that takes, and whose transitions it holds."""

from itertools import chain

from grafana_foundation_sdk.builders import timeseries
from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards.door import door
from dashboards.frame import REPLAY, dashboard
from dashboards.panels import lines

SELECTED = f"{{{REPLAY}}}"
TOOK = "dase_replay_request_duration_seconds"


def rate(metric: str, by: str) -> str:
    """The rate of a counter of the replay, summed by labels."""
    return f"sum by ({by}) (rate({metric}{SELECTED}[$__rate_interval]))"


def quantile(share: float, metric: str, by: str = "") -> str:
    """A quantile of a histogram of the replay."""
    labels = ", ".join(filter(None, ("le", by)))
    return (
        f"histogram_quantile({share}, sum by ({labels}) (rate({metric}_bucket{SELECTED}[$__rate_interval])))"
    )


def replay() -> Dashboard:
    """Throughput, latency, composition and calls of the replay."""
    made = dashboard("dase-replay", "DASE replay", __doc__ or "", ("replay",))
    parts = (_traffic(), _latency(), _buffer(), _shards(), _calls(), _health(), door("replay", SELECTED))
    for panel in chain.from_iterable(parts):
        made.with_panel(panel)
    return made


def _traffic() -> list[timeseries.Panel]:
    """Transitions in and out."""
    return [
        lines(
            "Inserted per second",
            "Transitions stored, by the agent that collected them.",
            [(rate("dase_replay_inserted_transitions_total", "agent_id"), "agent {{agent_id}}")],
            stacked=True,
        ),
        lines(
            "Sampled per second",
            "Transitions sent in batches, by the agent that asked.",
            [(rate("dase_replay_sampled_transitions_total", "agent_id"), "agent {{agent_id}}")],
            stacked=True,
        ),
        lines(
            "Samples per insert",
            "How often a transition is drawn on average.",
            [
                (
                    f"sum(rate(dase_replay_sampled_transitions_total{SELECTED}[$__rate_interval])) / "
                    f"sum(rate(dase_replay_inserted_transitions_total{SELECTED}[$__rate_interval]))",
                    "ratio",
                )
            ],
        ),
    ]


def _latency() -> list[timeseries.Panel]:
    """How long requests take."""
    return [
        lines(
            "Time to serve a request, 99 %",
            "A chunk of Insert until it is committed, a batch of Sample until gRPC has it, or another call.",
            [(quantile(0.99, TOOK, "rpc"), "{{rpc}}")],
            unit="s",
            logarithmic=True,
        ),
        lines(
            "Time to serve a request, median",
            "The same, for half of all requests.",
            [(quantile(0.5, TOOK, "rpc"), "{{rpc}}")],
            unit="s",
            logarithmic=True,
        ),
        lines(
            "Wait for enough transitions, 99 %",
            "How long a batch waited until the buffer held min_size transitions; 0 after the start.",
            [(quantile(0.99, "dase_replay_sample_wait_seconds"), "Sample")],
            unit="s",
        ),
    ]


def _buffer() -> list[timeseries.Panel]:
    """What the buffer holds."""
    return [
        lines(
            "Buffer by agent",
            "Whose transitions the buffer holds.",
            [(f"sum by (agent_id) (dase_replay_buffer_transitions{SELECTED})", "agent {{agent_id}}")],
            stacked=True,
        ),
        lines(
            "Evicted per second",
            "Transitions that made room for newer ones; 0 until the buffer is full.",
            [(rate("dase_replay_evicted_transitions_total", "agent_id"), "agent {{agent_id}}")],
            stacked=True,
        ),
        lines(
            "Buffer bytes",
            "Bytes of the transitions present.",
            [(f"dase_replay_buffer_bytes{SELECTED}", "{{instance}}")],
            unit="bytes",
        ),
    ]


def _shards() -> list[timeseries.Panel]:
    """How evenly shards are used; one line each where there is one replay."""
    return [
        lines(
            "Shards",
            "Replays that Prometheus scrapes and that answer; see the alert DaseReplayDown.",
            [(f"sum(up{SELECTED})", "up")],
        ),
        lines(
            "Inserted per second by shard",
            "Rows are spread evenly; a shard that is away gets none.",
            [(rate("dase_replay_inserted_transitions_total", "instance"), "{{instance}}")],
        ),
        lines(
            "Full by shard",
            "How full each shard is.",
            [
                (
                    f"sum by (instance) (dase_replay_buffer_transitions{SELECTED}) "
                    f"/ sum by (instance) (dase_replay_buffer_capacity_transitions{SELECTED})",
                    "{{instance}}",
                )
            ],
            unit="percentunit",
        ),
    ]


def _calls() -> list[timeseries.Panel]:
    """Bytes, streams and how calls end."""
    return [
        lines(
            "Received",
            "Bytes of messages that came in, by call.",
            [(rate("dase_replay_received_bytes_total", "rpc"), "{{rpc}}")],
            unit="Bps",
        ),
        lines(
            "Sent",
            "Bytes of messages that went out, by call.",
            [(rate("dase_replay_sent_bytes_total", "rpc"), "{{rpc}}")],
            unit="Bps",
        ),
        lines(
            "Open streams",
            "One Insert and one Sample stream of each learner and an Insert of each actor, as a rule.",
            [(f"dase_replay_active_streams{SELECTED}", "{{instance}} {{rpc}}")],
        ),
        lines(
            "Calls ended per second",
            "By status; anything but OK is a refusal or a stream that broke.",
            [(rate("grpc_server_handled_total", "grpc_method, grpc_code"), "{{grpc_method}} {{grpc_code}}")],
        ),
    ]


def _health() -> list[timeseries.Panel]:
    """What went wrong, and what would be lost."""
    return [
        lines(
            "Refused transitions",
            "Transitions that were not finite, since the start.",
            [
                (
                    f"sum by (agent_id, reason) (dase_replay_rejected_transitions_total{SELECTED})",
                    "agent {{agent_id}} {{reason}}",
                )
            ],
        ),
        lines(
            "Leases",
            "Agents by what became of their lease; an agent with several leases had its node replaced.",
            [
                (f"dase_replay_leases{SELECTED}", "{{instance}} {{state}}"),
                (f"dase_replay_leases_granted_total{SELECTED}", "{{instance}} granted to agent {{agent_id}}"),
            ],
        ),
        lines(
            "Event loop lag, 99 %",
            "How late the replay's event loop is; everything else waits for it.",
            [(quantile(0.99, "dase_event_loop_lag_seconds", "instance"), "{{instance}}")],
            unit="s",
        ),
        lines(
            "Not on the disk since",
            "What a power loss would take; needs a buffer on disk.",
            [(f"time() - dase_replay_last_sync_timestamp_seconds{SELECTED}", "{{instance}}")],
            unit="s",
        ),
    ]
