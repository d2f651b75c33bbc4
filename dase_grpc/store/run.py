"""One run's shared state: identity, leases, policies, and the buffer that the first learner brings about."""

from dase_grpc.errors import CapacityError, NotJoinedError, RunMismatchError, SchemaMismatchError
from dase_grpc.schema import TransitionSchema
from dase_grpc.store.leases import Lease, LeaseTable
from dase_grpc.store.policies import PolicyBoard
from dase_grpc.store.replay import ReplayStore
from dase_grpc.store.ring import RingBuffer

MAX_NAME = 100
"""Characters of a name that a client sent which a refusal repeats."""


class SharedRun:
    """What the replay node holds. Single-threaded; nothing blocks.

    The service knows no environment: the first learner to join states the schema, which fixes the
    width of the rows and so, for a capacity in bytes, the number of transitions.
    """

    def __init__(self, run_id: str, *, capacity: int | str, min_size: int, seed: int, ttl_s: float) -> None:
        self.run_id = run_id
        self.min_size = min_size
        self.seed = seed
        self.leases = LeaseTable(ttl_s=ttl_s)
        self.policies = PolicyBoard()
        self._capacity = capacity
        self._store: ReplayStore | None = None

    @property
    def opened(self) -> bool:
        """Whether a learner has joined, so that there is a schema and a buffer."""
        return self._store is not None

    @property
    def store(self) -> ReplayStore:
        """The buffer.

        Raises:
            NotJoinedError: no learner has joined yet.
        """
        if self._store is None:
            raise NotJoinedError(f"run {self.run_id!r} has no schema yet: no learner has joined")
        return self._store

    @property
    def ready(self) -> bool:
        """Whether enough transitions are there to serve batches."""
        return self._store is not None and len(self._store.ring) >= self.min_size

    def join(
        self, node_name: str, *, wanted: int | None, run_id: str, schema: TransitionSchema, now: float
    ) -> Lease:
        """Leases an agent id; the first to join opens the buffer with its schema.

        Raises:
            RunMismatchError, SchemaMismatchError, AgentTakenError, MalformedError: see errors.py.
            CapacityError: the buffer does not fit into this machine's memory.
        """
        if run_id:
            self.require_run(run_id)
        store = self._store
        if store is None:
            store = self._make_store(schema)
        store.schema.require_equal(schema)
        lease = self.leases.join(node_name, wanted, now)
        self._store = store  # only now: a node that is refused must not decide the schema
        return lease

    def require_run(self, run_id: str) -> None:
        """Checks that a client means this run.

        Raises:
            RunMismatchError: it means another.
        """
        if run_id != self.run_id:
            raise RunMismatchError(
                f"this service holds run_id = {self.run_id!r}, the client asks for {run_id[:MAX_NAME]!r}; "
                f"leave --run-id out, or name the run that is here"
            )

    def require_stream(self, *, run_id: str, agent_id: int, epoch: int, fingerprint: str) -> ReplayStore:
        """The buffer, for a stream that states what it belongs to.

        Raises:
            RunMismatchError, NotJoinedError, SchemaMismatchError, StaleLeaseError: see errors.py.
        """
        self.require_reader(run_id=run_id, fingerprint=fingerprint)
        self.leases.require(agent_id, epoch)
        return self.store

    def require_reader(self, *, run_id: str, fingerprint: str) -> None:
        """Checks that a stream that needs no lease means this run and its schema.

        Raises:
            RunMismatchError, NotJoinedError, SchemaMismatchError: see errors.py.
        """
        self.require_run(run_id)
        ours = self.store.schema.fingerprint
        if fingerprint != ours:
            raise SchemaMismatchError(
                f"the buffer's schema_fingerprint is {ours}, "
                f"the stream states {fingerprint[:MAX_NAME] or 'none'}; "
                f"make the environment as the other learners do, or start another replay"
            )

    def _make_store(self, schema: TransitionSchema) -> ReplayStore:
        ring = RingBuffer(schema, self._capacity)
        if self.min_size > ring.capacity:
            raise CapacityError(
                f"replay.min_size = {self.min_size} exceeds the {ring.capacity} transitions of "
                f"{schema.row_bytes} bytes that replay.capacity = {self._capacity} holds"
            )
        return ReplayStore(ring)
