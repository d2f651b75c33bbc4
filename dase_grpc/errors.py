"""Every error this project raises on purpose; each message is one sentence a person can act on.

DaseError
├── UsageError: what this machine's user asked for cannot be done
│   ├── ConfigError, EnvironmentSpecError, MeasureError, AlgorithmError
│   ├── DeviceError, AddressError, CredentialsError
│   ├── RunDirectoryError
│   │   └── DiskFullError
│   └── DataDirectoryError
├── NodeFailedError, SchedulerError
├── WaitedTooLongError, DivergedError, EnvironmentFailedError, EnvironmentHangsError
└── RefusalError: what the service answers instead of doing it (replay/wire/status.py)
    ├── UnauthenticatedError, NotPermittedError, MalformedError
    ├── SchemaMismatchError, RunMismatchError, NotJoinedError, BufferGoneError, CapacityError
    ├── SequenceGapError, TooManyWritersError, WriterForgottenError
    ├── AgentTakenError, StaleLeaseError, StalePolicyError
    └── OverloadedError, DrainingError, UnreachableError
"""

from typing import Final

USAGE_CODE: Final = 2
REFUSED_CODE: Final = 3
DISK_FULL_CODE: Final = 4
LASTING_CODES: Final = frozenset({USAGE_CODE, REFUSED_CODE, DISK_FULL_CODE})
"""Exit codes of a process that would end the same way if it were started again."""


class DaseError(Exception):
    """Base of all errors raised on purpose; `str(error)` is the sentence to show."""

    exit_code: int = 1
    """What a process exits with that ends on this error.

    2 for what its user asked, 3 for a refusal that the same request would always meet, 4 for a disk
    that is full, else 1.
    """


class UsageError(DaseError):
    """What the user of this machine asked for cannot be done."""

    exit_code = USAGE_CODE


class ConfigError(UsageError):
    """A setting is unknown, out of range, or contradicts another."""


class EnvironmentSpecError(UsageError):
    """An environment is missing, or its spaces cannot be used."""


class MeasureError(UsageError):
    """A measure of similarity is missing, or does not give one weight for each external transition."""


class AlgorithmError(UsageError):
    """An algorithm of the user's is missing, breaks a promise of agents, or cannot do what is asked of it."""


class DeviceError(UsageError):
    """The requested device does not exist on this machine, or cannot compute what is asked of it."""


class AddressError(UsageError):
    """An address cannot be parsed, bound, or must not be listened on without TLS."""


class CredentialsError(UsageError):
    """A certificate, key or token file is missing, does not fit, or can be read by others."""


class RunDirectoryError(UsageError):
    """A run directory or checkpoint is missing, already taken, or damaged."""


class DiskFullError(RunDirectoryError):
    """A disk takes no more of a run; what was kept of it before is whole, and can be gone on with."""

    exit_code = DISK_FULL_CODE


class DataDirectoryError(UsageError):
    """A replay's data directory is in use, full, damaged, or holds another buffer than was asked for."""


class NodeFailedError(DaseError):
    """A node of a local cluster ended before its time, with this exit code if it has ended."""

    def __init__(self, text: str, *, code: int | None = None) -> None:
        super().__init__(text)
        self.code = code
        if code == DISK_FULL_CODE:  # then the run can be gone on with
            self.exit_code = DISK_FULL_CODE


class SchedulerError(DaseError):
    """A cluster's scheduler, Slurm or Kubernetes, does not answer, or refuses a job."""


class WaitedTooLongError(DaseError):
    """What a node waits for, which another node has to bring about, has not come within its limit."""


class DivergedError(DaseError):
    """An agent's networks hold numbers that are not finite, so it cannot go on."""


class EnvironmentFailedError(DaseError):
    """An environment raised, and did so again whenever it was made anew."""


class EnvironmentHangsError(DaseError):
    """A call into an environment does not return, and its thread cannot be ended."""


class RefusalError(DaseError):
    """The service's answer instead of doing what was asked."""


class UnauthenticatedError(RefusalError):
    """The caller has shown no certificate or token that the service accepts, or the service none."""

    exit_code = REFUSED_CODE


class NotPermittedError(RefusalError):
    """The caller's role may not do this, or not as this agent."""

    exit_code = REFUSED_CODE


class MalformedError(RefusalError):
    """The request cannot be understood."""

    exit_code = REFUSED_CODE


class SchemaMismatchError(RefusalError):
    """The stream's transition schema is not the buffer's."""

    exit_code = REFUSED_CODE


class RunMismatchError(RefusalError):
    """The stream belongs to another run."""

    exit_code = REFUSED_CODE


class NotJoinedError(RefusalError):
    """Nobody has joined yet, so the service has no schema and no buffer."""


class BufferGoneError(RefusalError):
    """The service came back without the buffer, and so without the leases, that the client means."""


class CapacityError(RefusalError):
    """The buffer does not fit into the machine, or holds less than what is asked of it."""

    exit_code = REFUSED_CODE


class SequenceGapError(RefusalError):
    """The rows before these have not been committed."""


class TooManyWritersError(RefusalError):
    """The bounded table of writers is full."""

    exit_code = REFUSED_CODE


class WriterForgottenError(RefusalError):
    """A writer was away for so long that what it has committed may have been forgotten."""


class AgentTakenError(RefusalError):
    """A live node holds the agent id."""


class StaleLeaseError(RefusalError):
    """The lease has ended, or its agent id was given to another node."""

    exit_code = REFUSED_CODE


class StalePolicyError(RefusalError):
    """The agent has published a newer policy, or another one of this version."""


class OverloadedError(RefusalError):
    """As many calls or streams are open, or as much memory is in use for them, as the service takes."""


class DrainingError(RefusalError):
    """The service is shutting down and takes nothing more."""


class UnreachableError(RefusalError):
    """The service did not answer in time, or its connection broke."""


class Halted(Exception):
    """The driver closed the sink or the source: training shall end."""
