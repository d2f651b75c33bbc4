"""Options of a node, each a field of which `dase node` makes its flag: of every role, and of the clients'.

The command line imports this before it knows what is asked of it, so what is large is imported late.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from dase_grpc.config.resolve import RunConfig
from dase_grpc.errors import AddressError, ConfigError
from dase_grpc.replay.security.identity import (
    CRL_VARIABLE,
    TLS_VARIABLE,
    TOKEN_FILE_VARIABLE,
    TOKENS_VARIABLE,
)
from dase_grpc.replay.wire.addresses import NO_HOST, REPLAY_TIMEOUT_S, Address, ReplayPlace, can_be_host

if TYPE_CHECKING:
    from dase_grpc.metrics.endpoint import Contexts
    from dase_grpc.replay.client.handoff import Times
    from dase_grpc.replay.client.patience import Wanted
    from dase_grpc.replay.security.dialler import Credentials

DEFAULT_ADDRESS: Final = "127.0.0.1:50051"
GRACE_S: Final = 2.0
"""How long calls that do not end by themselves may go on once the node stops."""


@dataclass(frozen=True)
class Flag:
    """A flag of `dase node`: the type of what is typed, and how the field's value is read out of that.

    Beside that what the command line is to know: under which heading of the help it stands, metavar, min ...
    """

    name: str
    help: str
    kind: Any
    read: Callable[[Any], Any]
    panel: str | None
    more: Mapping[str, Any]

    @property
    def parameter(self) -> str:
        """What the command's parameter is called."""
        return self.name.removeprefix("--").replace("-", "_")


def _as_it_is(value: Any) -> Any:
    return value


def flag(
    default: Any,
    name: str,
    text: str,
    kind: Any = str,
    *,
    read: Callable[[Any], Any] = _as_it_is,
    panel: str | None = None,
    **more: Any,
) -> Any:
    """A field of the options of a role: its value without the flag, and the flag."""
    return field(default=default, metadata={"flag": Flag(name, text, kind, read, panel, more)})


def _from_here(path: Path) -> Path:
    """A file that is read anew when it changes; an environment may move to another folder until then."""
    return Path.cwd() / path


def _host(text: str) -> str:
    if not can_be_host(text):
        raise AddressError(
            f"--metrics-host {text!r} is no host, {NO_HOST}; give a name or an address, e.g. 127.0.0.1"
        )
    return text


_client_flag = partial(flag, panel="Learner node")


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """What a node of any role is told on its command line."""

    metrics_port: int = flag(
        0, "--metrics-port", "Prometheus endpoint; 0 is off, the default.", int, min=0, max=65_535
    )
    metrics_host: str = flag(
        "127.0.0.1",
        "--metrics-host",
        "Where the Prometheus endpoint listens; else 127.0.0.1.",
        read=_host,
    )
    metrics_tls: Path | None = flag(
        None,
        "--metrics-tls",
        "A folder like that of --tls, of a replay's certificate for this host: serve metrics over HTTPS, to "
        "whom its ca.crt vouches for.",
        Path,
        read=_from_here,
        metavar="DIR",
    )
    insecure: bool = flag(
        False,
        "--insecure",
        "Allow plaintext beyond loopback: of the Prometheus endpoint, and of all without --tls.",
        bool,
    )
    tls: Path | None = flag(
        None,
        "--tls",
        "A folder with ca.crt, tls.crt and tls.key: encrypt, and show who this node is (docs/security.md).",
        Path,
        read=_from_here,
        envvar=TLS_VARIABLE,
        metavar="DIR",
    )

    def metrics_contexts(self) -> "Contexts | None":
        """What the Prometheus endpoint encrypts with; None where it is plain, or off.

        AddressError if it would be plain for other machines, and nobody has asked for that.
        """
        from dase_grpc.replay.security.folders import server_contexts
        from dase_grpc.replay.wire.addresses import require_private

        if self.metrics_port == 0:
            return None
        if self.metrics_tls is not None:
            return server_contexts(self.metrics_tls)
        where = Address(self.metrics_host, self.metrics_port)
        require_private(where, insecure=self.insecure, flag="--metrics-tls")
        return None

    @property
    def port_remedy(self) -> str:
        """What to do where the metrics port is taken."""
        from dase_grpc.metrics.endpoint import OTHER_PORT

        return OTHER_PORT

    @classmethod
    def flags(cls) -> dict[str, Flag]:
        """The flags of this role by the names of their fields, without those of the settings."""
        return {each.name: each.metadata["flag"] for each in fields(cls) if "flag" in each.metadata}

    @classmethod
    def parse(cls, **given: Any) -> Self:
        """The options out of what is given for fields; for None their defaults count."""
        flags = cls.flags()
        values = {name: value for name, value in given.items() if value is not None}
        return cls(
            **{name: flags[name].read(value) if name in flags else value for name, value in values.items()}
        )


@dataclass(frozen=True, kw_only=True)
class RunNodeOptions(NodeOptions):
    """What a node that is of a run is told."""

    run_id: str = flag("", "--run-id", "The run's name; a learner without it joins whatever run it finds.")


@dataclass(frozen=True, kw_only=True)
class ServiceOptions(NodeOptions):
    """What a node that others call is told."""

    listen: Address
    tokens: Path | None = flag(
        None,
        "--tokens",
        "With --tls, a file or folder of tokens; nodes then show a token instead of a certificate.",
        Path,
        panel="Replay node",
        envvar=TOKENS_VARIABLE,
        metavar="FILE",
    )
    crl: Path | None = flag(
        None,
        "--crl",
        "With --tls, a file of revocation lists (`dase certs revoke`), which is read again when it changes: "
        "certificates that are on it are refused.",
        Path,
        read=_from_here,
        panel="Replay node",
        envvar=CRL_VARIABLE,
        metavar="FILE",
    )
    grace_s: float = GRACE_S


def _replay_timeout_s(seconds: float) -> float:
    if not seconds >= 0:
        raise ConfigError(f"--replay-timeout {seconds:g} is not a time; give seconds, 0 or more")
    return seconds


@dataclass(frozen=True, kw_only=True)
class ClientOptions(RunNodeOptions):
    """What a node that needs a replay is told, beside the run's settings."""

    config: RunConfig
    replay: ReplayPlace = _client_flag(
        ReplayPlace.parse(DEFAULT_ADDRESS),
        "--replay",
        f"The replay's address, else {DEFAULT_ADDRESS}; of a sharded one those of all shards, with commas "
        "between them, or dns:NAME:PORT for a name that resolves to them.",
        read=ReplayPlace.parse,
        metavar="HOST:PORT",
    )
    replay_timeout_s: float = _client_flag(
        REPLAY_TIMEOUT_S,
        "--replay-timeout",
        "How long the replay, or the learner of an actor, may be away before the node ends; else "
        f"{REPLAY_TIMEOUT_S:g}.",
        float,
        read=_replay_timeout_s,
        metavar="SECONDS",
    )
    token_file: Path | None = _client_flag(
        None,
        "--token-file",
        "This node's token, with a --tls folder that needs ca.crt only.",
        Path,
        read=_from_here,
        envvar=TOKEN_FILE_VARIABLE,
        metavar="FILE",
    )
    stay: bool = _client_flag(
        False,
        "--stay",
        "Once it has finished, wait to be stopped instead of ending: where whatever ends is started again.",
        bool,
    )
    connect_timeout_s: float = 60.0
    timing: "Times | None" = None

    @property
    def credentials(self) -> "Credentials":
        """What the node shows to the replay."""
        from dase_grpc.replay.security.dialler import Credentials

        return Credentials(self.tls, self.token_file)

    def wanted(self, node_id: str, agent_id: int | None = None) -> "Wanted":
        """Which replay and run, and as which agent."""
        from dase_grpc.replay.client.handoff import USUAL
        from dase_grpc.replay.client.patience import Wanted

        return Wanted(
            self.replay.addresses[0],
            agent_id,
            self.run_id,
            node_id=node_id,
            timeout_s=self.connect_timeout_s,
            away_s=self.replay_timeout_s,
            credentials=self.credentials,
            timing=self.timing or USUAL,
        )


def _one_agent(role: str) -> Callable[[Sequence[int]], int]:
    def read(agents: Sequence[int]) -> int:
        if len(agents) > 1:
            raise ConfigError(
                f"--agent is given {len(agents)} times, and a {role} is of one agent; give it once"
            )
        return agents[0]

    return read


def _agent_flag(default: Any, read: Callable[[Sequence[int]], Any]) -> Any:
    return _client_flag(
        default,
        "--agent",
        "The agent id to take, else the next free one; an actor's agent; an evaluator's, else all (may be "
        "repeated).",
        list[int],
        read=read,
        min=0,
    )


def _require_agents(config: RunConfig, *agent_ids: int) -> None:
    """Checks agent ids that a node is given before it connects. ConfigError if the run has no such agent."""
    agents = config.train.agents
    for agent_id in agent_ids:
        if agent_id >= agents:
            raise ConfigError(
                f"--agent {agent_id} is not of this run, whose agents are 0..{agents - 1}; choose one of "
                f"them, or say how many there are with --agents, to every node of the run alike"
            )


@dataclass(frozen=True, kw_only=True)
class ResultsOptions(ClientOptions):
    """What a node that writes results is told; `command` is what they say it was started by."""

    run_dir: Path | None = _client_flag(None, "--run-dir", "Where results go; else runs/RUN_ID.", Path)
    command: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class LearnerOptions(ResultsOptions):
    """What a learner node is told on its command line; without a metrics port the configuration's counts."""

    agent_id: int | None = _agent_flag(None, _one_agent("learner"))
    resume: bool = _client_flag(
        False, "--resume", "Go on from the agent's last checkpoint in --run-dir.", bool
    )
    unfinished_code: int = _client_flag(
        0,
        "--unfinished-code",
        "The exit code when it is stopped before its last step, or another learner still has its agent, for "
        "schedulers that take 0 for done; else 0, or 1.",
        int,
        min=0,
        max=255,
    )
    gpu: int | None = flag(None, "--gpu", "CUDA device index; without it the CPU.", int)

    @classmethod
    def parse(cls, **given: Any) -> Self:
        """See `NodeOptions.parse`."""
        options = super().parse(**given)
        agent_id = options.agent_id or 0
        _require_agents(options.config, agent_id)
        if given.get("metrics_port") is None and (port := options.config.metrics.port):
            return replace(options, metrics_port=port + 1 + agent_id)
        return options

    @property
    def port_remedy(self) -> str:
        """See `NodeOptions.port_remedy`; probes have to reach a learner before it knows its agent."""
        port = self.config.metrics.port
        if self.agent_id is not None or not port or self.metrics_port != port + 1:
            return super().port_remedy
        return (
            "a learner without --agent takes agent 0's port, metrics.port + 1, so give each learner of this "
            "machine its --agent, or a --metrics-port"
        )

    def wanted(self, node_id: str, agent_id: int | None = None) -> "Wanted":
        """What to join; the replay of a learner that resumes has been there, so it counts as away."""
        first_s = max(self.connect_timeout_s, self.replay_timeout_s if self.resume else 0.0)
        return replace(super().wanted(node_id, self.agent_id), timeout_s=first_s)


@dataclass(frozen=True, kw_only=True)
class ActorOptions(ClientOptions):
    """What an actor node is told on its command line."""

    agent_id: int = _agent_flag(MISSING, _one_agent("actor"))
    envs: int = flag(
        1, "--envs", "Environments to step in turn, else 1.", int, panel="Actor node", min=1, max=1_024
    )

    @classmethod
    def parse(cls, **given: Any) -> Self:
        """See `NodeOptions.parse`."""
        if not given.get("agent_id"):
            raise ConfigError("an actor says whose actor it is; give it an agent id with --agent")
        options = super().parse(**given)
        _require_agents(options.config, options.agent_id)
        return options


@dataclass(frozen=True, kw_only=True)
class EvaluatorOptions(ResultsOptions):
    """What an evaluator node is told on its command line; no agents are all agents."""

    agents: Sequence[int] = _agent_flag((), tuple)

    @classmethod
    def parse(cls, **given: Any) -> Self:
        """See `NodeOptions.parse`."""
        options = super().parse(**given)
        return replace(options, agents=options.evaluated)

    @property
    def evaluated(self) -> list[int]:
        """The agents to evaluate, in order. ConfigError if one does not exist."""
        _require_agents(self.config, *self.agents)
        return sorted(set(self.agents)) or list(range(self.config.train.agents))
