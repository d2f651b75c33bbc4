"""Sites: where the cells of an experiment run besides this machine, the tables [slurm] and [kubernetes]."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from dase_grpc.config.resolve import sentence
from dase_grpc.config.sections import Section
from dase_grpc.config.texts import size_bytes
from dase_grpc.errors import ConfigError

Mode = Literal["lockstep", "cluster"]
Place = Literal["local", "slurm", "kubernetes"]

SIGNALLED_EARLIER_S: Final = 60
"""So much earlier than asked Slurm may send a signal."""

OURS: Final = frozenset(
    [
        "array",
        "cpus-per-task",
        "error",
        "gpus-per-node",
        "job-name",
        "mem",
        "no-requeue",
        "nodes",
        "ntasks",
        "ntasks-per-node",
        "open-mode",
        "output",
        "partition",
        "requeue",
        "signal",
        "time",
        "wait",
        "wrap",
    ]
)
"""Flags of sbatch that other settings set, or without which a cell would not go on."""

ELSEWHERE: Final = frozenset(["cluster", "cluster-constraint", "clusters"])
"""Flags of sbatch by which another Slurm gets the job, of which this one's squeue would then not know."""

OTHER_CLUSTER: Final = (
    "for squeue does not show here what is queued there; run the command on a login node of that cluster, "
    "or with SLURM_CONF set to its slurm.conf"
)
"""What is said where another cluster is wished for."""


def _is_a_size(text: str) -> str:
    if not size_bytes(text):
        raise ValueError(f"{text!r} is no memory at all")  # to Slurm 0 is all that a node has
    return text


def _is_a_line(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise ValueError(f"{text!r} is not one line of text")
    return text


def _is_a_name(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?", text):
        raise ValueError(f"{text!r} is no name of Kubernetes: small letters, digits, '-' and '.' in between")
    return text


Line = Annotated[str, AfterValidator(_is_a_line)]
Name = Annotated[str, AfterValidator(_is_a_name)]
Size = Annotated[str, AfterValidator(_is_a_size)]


class _Site(Section):
    """What a cell is given, and how many of them there are at once."""

    # Every command imports this module for its flags, and few read such a table.
    model_config = ConfigDict(defer_build=True)

    at_once: PositiveInt = Field(16, description="cells that run at once, at most")
    cpus: PositiveInt | None = Field(
        None, description="cores of a cell; else as many as its processes keep busy"
    )
    memory: Size = Field("4GiB", description="memory of a cell")
    gpus: NonNegativeInt = Field(0, description="GPUs of a cell; it trains on the CPU without one")

    def gpu_flag(self, mode: Mode) -> str | None:
        """What a cell is told of `--gpu`: in one process its one GPU, else all that it is given."""
        if not self.gpus:
            return None
        return "0" if mode == "lockstep" else "all"

    @property
    def memory_mib(self) -> int:
        """The memory in MiB, rounded up."""
        return -(-size_bytes(self.memory) // 2**20)


class SlurmSite(_Site):
    """The table [slurm]: what each task of the job array is given."""

    partition: Line | None = Field(None, description="where the tasks are queued; else the site's default")
    time_minutes: PositiveInt = Field(240, description="time limit of a task, which then queues itself again")
    stop_s: PositiveInt = Field(
        120, description="how long before the limit, in seconds, a cell is told to stop"
    )
    setup: tuple[Line, ...] = Field(
        (), description="lines of shell before a cell, such as 'module load cuda'"
    )
    sbatch: dict[str, Any] = Field({}, description="further flags of sbatch, such as account")

    @field_validator("sbatch")
    @classmethod
    def _are_flags(cls, flags: Mapping[str, Any]) -> Mapping[str, Any]:
        for flag, value in flags.items():
            if not re.fullmatch(r"[a-z][a-z-]*", flag):
                raise ValueError(f"{flag!r} is no flag of sbatch; write it long and without dashes before it")
            if flag in ELSEWHERE:
                raise ValueError(f"{flag} is not to be set, {OTHER_CLUSTER}")
            if flag in OURS:
                raise ValueError(f"{flag} is not yours to set here; see which key of [slurm] is about it")
            if value is not True and not (
                isinstance(value, (str, int)) and str(value).isprintable() and value
            ):
                raise ValueError(f"{flag} = {value!r} is neither true nor a number nor one line of text")
        return flags

    @model_validator(mode="after")
    def _leaves_time_to_train(self) -> Self:
        if self.time_minutes * 60 <= self.stop_s + SIGNALLED_EARLIER_S:
            raise ValueError(
                f"time_minutes = {self.time_minutes} leaves no time to train, for cells are told to stop up "
                f"to {self.stop_s + SIGNALLED_EARLIER_S} s earlier; raise it, or lower stop_s"
            )
        return self


class KubernetesSite(_Site):
    """The table [kubernetes]: what each pod of the Job is given."""

    image: Line = Field(description="the image of the pods, which has this version of DASE")
    claim: Name = Field(description="the PersistentVolumeClaim with the runs, which many nodes write at once")
    namespace: Name = Field("default", description="where the Job is made")
    retries: NonNegativeInt = Field(3, description="how often the pod of a cell that failed is tried again")
    node_selector: dict[str, Line] = Field({}, description="labels of the nodes that cells may run on")


Chosen = TypeVar("Chosen", bound=_Site)


def read_site(kind: type[Chosen], name: str, table: Any, *, mode: Mode) -> Chosen:
    """The site in a table of the file, for cells of a mode; what is wrong is a ConfigError."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"{name} = {table!r} must be a table")
    for key in table:
        if key not in kind.model_fields:
            raise ConfigError(f"[{name}] has no key {key}; there are {', '.join(kind.model_fields)}")
    for key, field in kind.model_fields.items():
        if field.is_required() and key not in table:
            raise ConfigError(f"[{name}] needs {key}: {field.description}")
    try:
        site = kind.model_validate(table)
    except ValidationError as error:
        raise ConfigError(f"[{name}]: {sentence(error, known=())}") from None
    if mode == "lockstep" and site.gpus > 1:
        raise ConfigError(f"[{name}]: gpus = {site.gpus}, and a cell in lockstep trains on one; ask for one")
    return site
