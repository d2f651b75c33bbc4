"""A service's door: whom it has refused, and whether its revocation lists are in use, and how long."""

from grafana_foundation_sdk.builders import timeseries

from dashboards.panels import lines


def door(role: str, selected: str) -> list[timeseries.Panel]:
    """The panels of a role's door, `replay` or `inference`, of the series that are selected."""
    return [
        lines(
            "Refused callers",
            "Calls per second without credentials or permission, by reason; connections that brought none.",
            [
                (
                    f"sum by (instance, reason) (rate(dase_{role}_denied_calls_total{selected}"
                    f"[$__rate_interval]))",
                    "{{instance}} {{reason}}",
                )
            ],
        ),
        lines(
            "Revocation lists unfit",
            "1 where the lists that lie there cannot be used; see the alert DaseRevocationListUnfit.",
            [(f"dase_{role}_revocation_lists_unfit{selected}", "{{instance}}")],
        ),
        lines(
            "Revocation lists end in",
            "How long those in use count; see the alert DaseRevocationListEnding.",
            [(f"dase_{role}_revocation_lists_end_timestamp_seconds{selected} - time()", "{{instance}}")],
            unit="s",
        ),
    ]
