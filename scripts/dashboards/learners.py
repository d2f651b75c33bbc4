"""The learners: how fast they train, what they wait for, how it goes, and what went wrong."""

from grafana_foundation_sdk.builders import timeseries
from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards.frame import LEARNER, LEARNERS_PROCESS, STEPS_BY_AGENT, dashboard
from dashboards.panels import lines

SELECTED = f"{{{LEARNER}}}"
WAITS = f'dase_learner_update_duration_seconds_bucket{{stage="sample", {LEARNER}}}'


def stage(name: str) -> str:
    """The mean duration of a stage of an update."""
    window = f'{{stage="{name}", {LEARNER}}}[$__rate_interval]'
    metric = "dase_learner_update_duration_seconds"
    return f"rate({metric}_sum{window}) / rate({metric}_count{window})"


def learners() -> Dashboard:
    """Speed, waits, losses and troubles of each agent."""
    made = dashboard("dase-learners", "DASE learners", __doc__ or "", ("learner", "agent"))
    for panel in (*_speed(), *_waits(), *_learning(), *_sampling(), *_keeping(), *_troubles(), *_machine()):
        made.with_panel(panel)
    return made


def _speed() -> list[timeseries.Panel]:
    """How fast updates are made."""
    return [
        lines(
            "Updates per second",
            "Training iterations.",
            [(f"rate(dase_learner_updates_total{SELECTED}[$__rate_interval])", "agent {{agent_id}}")],
        ),
        lines(
            "Updates per environment step",
            "1 as soon as the random steps at the start are over, as in the paper; less with actors.",
            [
                (
                    f"sum by (run, agent_id) (rate(dase_learner_updates_total{SELECTED}[$__rate_interval])) "
                    f"/ {STEPS_BY_AGENT}",
                    "agent {{agent_id}}",
                )
            ],
        ),
        lines(
            "Stages of an update",
            "Mean time by the host's clock: waiting for the batch, copying, weighing and learning from it.",
            [
                (stage(name), f"agent {{{{agent_id}}}} {name}")
                for name in ("sample", "load", "weigh", "learn")
            ],
            unit="s",
        ),
    ]


def _waits() -> list[timeseries.Panel]:
    """What keeps a learner from training."""
    return [
        lines(
            "Wait for a batch, 99 %",
            "Near 0 where the replay keeps up; see the alert DaseSampleLatencyHigh.",
            [
                (
                    f"histogram_quantile(0.99, sum by (le, agent_id) (rate({WAITS}[$__rate_interval])))",
                    "agent {{agent_id}}",
                )
            ],
            unit="s",
            logarithmic=True,
        ),
        lines(
            "Waits of more than 5 s",
            "Seconds per second spent waiting for the replay, by what was waited for.",
            [
                (
                    f"rate(dase_learner_waiting_seconds_total{SELECTED}[$__rate_interval])",
                    "agent {{agent_id}} {{reason}}",
                )
            ],
            unit="percentunit",
        ),
        lines(
            "Batches here",
            "Batches drawn ahead of their use, at most replay.prefetch.",
            [(f"dase_learner_prefetched_batches{SELECTED}", "agent {{agent_id}}")],
        ),
    ]


def _learning() -> list[timeseries.Panel]:
    """How training goes."""
    return [
        lines(
            "Losses",
            "Latest losses and mean Q-value.",
            [(f"dase_learner_loss{SELECTED}", "agent {{agent_id}} {{loss}}")],
        ),
        lines(
            "Age of own transitions",
            "Updates since the own transitions of a batch were collected, on average.",
            [(f"dase_learner_sample_age_updates{SELECTED}", "agent {{agent_id}}")],
        ),
        lines(
            "Lag of the exploring policy",
            "Updates by which the policy that explores is behind; 0 where the learner itself explores.",
            [(f"dase_explorer_policy_lag_updates{SELECTED}", "agent {{agent_id}}")],
        ),
        lines(
            "Evaluations",
            "Mean duration of an evaluation; the learner does nothing else meanwhile.",
            [
                (
                    f"dase_evaluation_duration_seconds_sum{SELECTED} / "
                    f"dase_evaluation_duration_seconds_count{SELECTED}",
                    "agent {{agent_id}}",
                )
            ],
            unit="s",
        ),
    ]


def _sampling() -> list[timeseries.Panel]:
    """What its batches hold."""
    return [
        lines(
            "Own share of batches",
            "Share of a batch that the agent collected itself (`replay.own_share`).",
            [(f"dase_sample_own_share_ratio{SELECTED}", "agent {{agent_id}}")],
            unit="percentunit",
        ),
        lines(
            "Priorities",
            'Largest and mean mass, (|TD error| + ε)^α; 0 unless `replay.sampling = "prioritised"`.',
            [
                (f"dase_sample_priority_largest_mass{SELECTED}", "agent {{agent_id}} largest"),
                (f"dase_sample_priority_mean_mass{SELECTED}", "agent {{agent_id}} mean"),
            ],
            logarithmic=True,
        ),
        lines(
            "Priorities ignored",
            "TD errors of transitions that were gone, or that were not finite, since the replay started.",
            [(f"dase_sample_priorities_ignored{SELECTED}", "agent {{agent_id}}")],
        ),
        lines(
            "Rows in place",
            "1 where rows are read from the replay's buffer on this machine, 0 where a stream brings them; "
            "batches drawn again since the start, for rows of theirs had been overwritten meanwhile.",
            [
                (f"dase_sample_in_place{SELECTED}", "agent {{agent_id}} in place"),
                (f"dase_sample_overwritten_batches{SELECTED}", "agent {{agent_id}} drawn again"),
            ],
        ),
    ]


def _keeping() -> list[timeseries.Panel]:
    """What is on its way, or only here."""
    return [
        lines(
            "Not acknowledged",
            "Transitions on their way to the replay; they grow while it is away.",
            [(f"dase_explorer_unacknowledged_transitions{SELECTED}", "agent {{agent_id}}")],
        ),
        lines(
            "Age of the last checkpoint",
            "What the loss of a learner would take.",
            [
                (
                    f"time() - dase_learner_checkpoint_last_success_timestamp_seconds{SELECTED}",
                    "agent {{agent_id}}",
                )
            ],
            unit="s",
        ),
        lines(
            "Finished",
            "1 where a learner has nothing left to do and stays until it is stopped.",
            [(f"dase_explorer_finished{SELECTED}", "agent {{agent_id}}")],
        ),
    ]


def _troubles() -> list[timeseries.Panel]:
    """What went wrong."""
    return [
        lines(
            "Troubles",
            "Since the start: streams that broke, losses of the replay's data, environments made anew.",
            [
                (
                    f"sum by (agent_id) (dase_learner_reconnects_total{SELECTED})",
                    "agent {{agent_id}} reconnects",
                ),
                (f"dase_learner_replay_losses_total{SELECTED}", "agent {{agent_id}} losses of the replay"),
                (
                    f"sum by (agent_id) (dase_explorer_env_restarts_total{SELECTED})",
                    "agent {{agent_id}} environments made anew",
                ),
            ],
        ),
        lines(
            "Left out",
            "Since the start: updates that were skipped, and transitions that were not finite.",
            [
                (f"dase_learner_skipped_updates_total{SELECTED}", "agent {{agent_id}} update {{reason}}"),
                (f"dase_explorer_refused_transitions_total{SELECTED}", "agent {{agent_id}} row {{reason}}"),
            ],
        ),
    ]


def _machine() -> list[timeseries.Panel]:
    """What the process takes."""
    return [
        lines(
            "GPU memory",
            "What PyTorch has reserved; 0 on a CPU.",
            [(f"dase_learner_gpu_memory_bytes{SELECTED}", "agent {{agent_id}}")],
            unit="bytes",
        ),
        lines(
            "Event loop lag, 99 %",
            "How late the learner's event loop is, which carries its streams.",
            [
                (
                    "histogram_quantile(0.99, sum by (le, instance) (rate("
                    f"dase_event_loop_lag_seconds_bucket{{{LEARNERS_PROCESS}}}[$__rate_interval])))",
                    "{{instance}}",
                )
            ],
            unit="s",
        ),
    ]
