"""Policy servers (`dase serve`): what they are asked, how long answers take, and whom they refuse."""

from grafana_foundation_sdk.builders import timeseries
from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards.door import door
from dashboards.frame import SERVER, dashboard
from dashboards.panels import lines

SELECTED = f"{{{SERVER}}}"


def rate(metric: str, by: str = "instance") -> str:
    """The rate of a counter of policy servers, summed by labels."""
    return f"sum by ({by}) (rate({metric}{SELECTED}[$__rate_interval]))"


def slowest(metric: str, by: str = "instance") -> str:
    """What one of a hundred takes longer than, of a histogram of policy servers."""
    return f"histogram_quantile(0.99, {rate(f'{metric}_bucket', f'le, {by}')})"


def serving() -> Dashboard:
    """Throughput, latency, calls and door of policy servers."""
    made = dashboard("dase-serving", "DASE policy servers", __doc__ or "", ("server",))
    for panel in (*_traffic(), *_latency(), *_calls(), *door("inference", SELECTED)):
        made.with_panel(panel)
    return made


def _traffic() -> list[timeseries.Panel]:
    """What is asked."""
    observations, batches = "dase_inference_observations_total", "dase_inference_batches_total"
    return [
        lines(
            "Observations per second",
            "Observations that were answered.",
            [(rate(observations), "{{instance}}")],
        ),
        lines(
            "Observations per batch",
            "How many the policy computes at once; more where more are asked at the same time.",
            [(f"{rate(observations)} / {rate(batches)}", "{{instance}}")],
        ),
        lines(
            "Observations that wait",
            "They grow where the policy is slower than it is asked.",
            [(f"dase_inference_queued_observations{SELECTED}", "{{instance}}")],
        ),
    ]


def _latency() -> list[timeseries.Panel]:
    """How long answers take."""
    return [
        lines(
            title,
            text,
            [(slowest(f"dase_inference_{metric}", by), legend)],
            unit="s",
            logarithmic=True,
        )
        for title, text, metric, by, legend in (
            (
                "Time to serve a request, 99 %",
                "From a call until its answer.",
                "request_duration_seconds",
                "rpc",
                "{{rpc}}",
            ),
            (
                "Wait for a batch, 99 %",
                "From a request until its batch is begun.",
                "wait_seconds",
                "instance",
                "{{instance}}",
            ),
            (
                "Time of a batch, 99 %",
                "What the policy itself takes.",
                "batch_duration_seconds",
                "instance",
                "{{instance}}",
            ),
        )
    ]


def _calls() -> list[timeseries.Panel]:
    """Bytes, and how calls end."""
    return [
        lines(
            "Received",
            "Bytes of messages that came in, by call.",
            [(rate("dase_inference_received_bytes_total", "rpc"), "{{rpc}}")],
            unit="Bps",
        ),
        lines(
            "Sent",
            "Bytes of messages that went out, by call.",
            [(rate("dase_inference_sent_bytes_total", "rpc"), "{{rpc}}")],
            unit="Bps",
        ),
        lines(
            "Calls ended per second",
            "By status; anything but OK is a refusal or a stream that broke.",
            [(rate("grpc_server_handled_total", "grpc_method, grpc_code"), "{{grpc_method}} {{grpc_code}}")],
        ),
    ]
