"""Actors and evaluators: what they do with the policies that learners publish, and what they wait for."""

from typing import Final

from grafana_foundation_sdk.builders import timeseries
from grafana_foundation_sdk.builders.dashboard import Dashboard

from dashboards.frame import ACTOR, EVALUATOR, EVALUATORS_PROCESS, REPLAY, dashboard
from dashboards.panels import lines

ACTORS: Final = f"{{{ACTOR}}}"
EVALUATORS: Final = f"{{{EVALUATOR}}}"
BY_ACTOR: Final = "agent {{agent_id}} {{instance}}"
BY_AGENT: Final = "agent {{agent_id}}"


def followers() -> Dashboard:
    """Policies, actors and evaluators of each agent."""
    variables = ("replay", "actor", "evaluator", "agent")
    made = dashboard("dase-followers", "DASE actors and evaluators", __doc__ or "", variables)
    for panel in (*_policies(), *_exploring(), *_sending(), *_troubles(), *_evaluating()):
        made.with_panel(panel)
    return made


def _policies() -> list[timeseries.Panel]:
    """What there is to follow, and who does."""
    return [
        lines(
            "Published policy",
            "Updates that the newest policy at the replay has had; flat where a learner does not train.",
            [(f"dase_replay_policy_version{{{REPLAY}}}", BY_AGENT)],
        ),
        lines(
            "Policy lag",
            "Updates by which the policy that an actor explores with is behind its learner.",
            [(f"dase_explorer_policy_lag_updates{ACTORS}", BY_ACTOR)],
        ),
        lines(
            "Environments",
            "Environments that actors step, by agent.",
            [(f"sum by (agent_id) (dase_actor_environments{ACTORS})", BY_AGENT)],
            stacked=True,
        ),
    ]


def _exploring() -> list[timeseries.Panel]:
    """What actors explore."""
    return [
        lines(
            "Actor steps per second",
            "Environment steps of each actor; see the alert DaseActorStalled.",
            [(f"rate(dase_explorer_env_steps_total{ACTORS}[$__rate_interval])", BY_ACTOR)],
            stacked=True,
        ),
        lines(
            "Actor episode return",
            "Return of each actor's latest episode, with exploration noise.",
            [(f"dase_explorer_episode_return{ACTORS}", BY_ACTOR)],
        ),
        lines(
            "Actor waits of more than 5 s",
            "Seconds per second spent waiting, by what was waited for.",
            [
                (
                    f"rate(dase_actor_waiting_seconds_total{ACTORS}[$__rate_interval])",
                    f"{BY_ACTOR} {{{{reason}}}}",
                )
            ],
            unit="percentunit",
        ),
    ]


def _sending() -> list[timeseries.Panel]:
    """What actors hand on."""
    return [
        lines(
            "Acknowledged per second",
            "Transitions of actors whose commit the replay has acknowledged.",
            [(f"rate(dase_explorer_acknowledged_transitions_total{ACTORS}[$__rate_interval])", BY_ACTOR)],
            stacked=True,
        ),
        lines(
            "Actor transitions not acknowledged",
            "Transitions on their way to the replay; they grow while it is away.",
            [(f"dase_explorer_unacknowledged_transitions{ACTORS}", BY_ACTOR)],
        ),
    ]


def _troubles() -> list[timeseries.Panel]:
    """What went wrong at an actor."""
    return [
        lines(
            "Actor troubles",
            "Since the start: streams that broke, losses of the replay's data, environments made anew, "
            "transitions that were not finite.",
            [
                (f"sum by (agent_id, instance) ({metric}{ACTORS})", f"{BY_ACTOR} {text}")
                for metric, text in (
                    ("dase_actor_reconnects_total", "reconnects"),
                    ("dase_actor_replay_losses_total", "losses of the replay"),
                    ("dase_explorer_env_restarts_total", "environments made anew"),
                    ("dase_explorer_refused_transitions_total", "rows left out"),
                )
            ],
        )
    ]


def _evaluating() -> list[timeseries.Panel]:
    """What evaluators measure, and whether they keep up."""
    seconds = "dase_evaluation_duration_seconds"
    window = f"{EVALUATORS}[$__rate_interval]"
    return [
        lines(
            "Return by evaluators",
            "Mean return of the latest evaluation of each agent by an evaluator, without noise.",
            [(f"dase_evaluation_return_mean{EVALUATORS}", BY_AGENT)],
        ),
        lines(
            "Duration of an evaluation",
            "Mean over all evaluations since the start.",
            [(f"{seconds}_sum{EVALUATORS} / {seconds}_count{EVALUATORS}", BY_AGENT)],
            unit="s",
        ),
        lines(
            "Evaluations per second",
            "Made, and left out because a newer policy was there first; see the alert DaseEvaluatorBehind.",
            [
                (f"rate({seconds}_count{window})", f"{BY_AGENT} made"),
                (f"rate(dase_evaluation_skipped_total{window})", f"{BY_AGENT} left out"),
            ],
        ),
        lines(
            "Evaluator troubles",
            "Since the start: streams that broke, losses of the replay's data, environments made anew.",
            [
                (f"sum by (instance) ({metric}{{{EVALUATORS_PROCESS}}})", f"{{{{instance}}}} {text}")
                for metric, text in (
                    ("dase_evaluator_reconnects_total", "reconnects"),
                    ("dase_evaluator_replay_losses_total", "losses of the replay"),
                    ("dase_evaluation_env_restarts_total", "environments made anew"),
                )
            ],
        ),
    ]
