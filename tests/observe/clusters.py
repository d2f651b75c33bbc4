"""Clusters as an observer sees them, made up."""

import io
from typing import Any

from rich.console import Console, RenderableType

from dase_grpc.observe.view import AgentView, BufferView, ClusterView, Look, NodeView
from dase_grpc.progress import Attendance, Progress


def agent(agent_id: int, *, of: int = 2, step: int = 400, **changes: Any) -> AgentView:
    """An agent in training that knows the similarity of all others."""
    progress = Progress(
        step=step,
        total_steps=1_000,
        updates=300,
        updates_per_second=91.4,
        episode_return=-3.25,
        first_evaluation_return=-10.5,
        evaluation_return=-2.0,
        similarity={source: 1.0 if source == agent_id else 10.0 ** -(source + 1) for source in range(of)},
        similarity_weight=0.05,
        state="training",
    )
    known: dict[str, Any] = {
        "node_name": f"learner@host-{agent_id}",
        "epoch": 1,
        "lease": "live",
        "seconds_since_heartbeat": changes.pop("silent_s", 0.25),
        "progress": progress,
    }
    return AgentView(agent_id, **(known | changes))


def actor(agent_id: int, **changes: Any) -> NodeView:
    """An actor that explores."""
    attendance = Attendance(4, 1_200, 55.5, policy_version=280, policy_lag_updates=20.0, state="exploring")
    known: dict[str, Any] = {"node_name": f"actor@host-{agent_id}", "attendance": attendance}
    known["seconds_since_attendance"] = changes.pop("silent_s", 0.0)
    return NodeView("actor", agent_id=agent_id, **(known | changes))


def buffer(agents: int, *, inserted: int = 3_000, **changes: Any) -> BufferView:
    """A buffer that all agents fill alike."""
    shares = dict.fromkeys(range(agents), 1_000)
    known: dict[str, Any] = {
        "size": 1_000 * agents,
        "capacity": 100_000,
        "inserted_total": inserted,
        "sampled_total": 256 * inserted,
        "size_by_agent": shares,
        "incarnations": ("first",),
    }
    return BufferView(**(known | changes))


def cluster(of: int = 2, *, step: int = 400, inserted: int = 3_000, **changes: Any) -> ClusterView:
    """A run that is well."""
    known: dict[str, Any] = {
        "run_id": "the-run",
        "environment": "Hopper-v5",
        "uptime_seconds": 130.0,
        "buffer": buffer(of, inserted=inserted),
        "agents": tuple(agent(agent_id, of=of, step=step) for agent_id in range(of)),
    }
    return ClusterView(**(known | changes))


def looks(seen: ClusterView | None = None, *, count: int = 10, agents: int = 2, **changes: Any) -> list[Look]:
    """Looks a second apart at a run that makes 10 steps a second for each agent; `seen` is the latest."""
    made = [
        cluster(agents, step=400 + 10 * at, inserted=3_000 + 10 * agents * at, **changes)
        for at in range(count)
    ]
    return [Look(float(at), view) for at, view in enumerate([*made[:-1], seen or made[-1]])]


def printed(shown: RenderableType, *, width: int = 80, height: int = 24) -> list[str]:
    """The lines that a terminal of this size would show, without trailing blanks."""
    console = Console(
        file=io.StringIO(), force_terminal=True, width=width, height=height, color_system="truecolor"
    )
    lines = console.render_lines(shown, console.options.update(width=width, height=None), pad=False)
    return ["".join(segment.text for segment in line).rstrip() for line in lines]
