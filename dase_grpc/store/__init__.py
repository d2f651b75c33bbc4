"""The state of a run: buffer, leases and policies. Synchronous, NumPy only; time is passed in."""

from dase_grpc.replay.buffer.leases import Lease, LeaseTable
from dase_grpc.replay.buffer.policies import Policy, PolicyBoard
from dase_grpc.replay.buffer.ring import RingBuffer
from dase_grpc.replay.buffer.run import SharedRun
from dase_grpc.replay.buffer.store import ReplayStore

__all__ = ["Lease", "LeaseTable", "Policy", "PolicyBoard", "ReplayStore", "RingBuffer", "SharedRun"]
