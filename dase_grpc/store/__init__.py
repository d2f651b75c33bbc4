"""The state of a run: buffer, leases and policies. Synchronous, NumPy only; time is passed in."""

from dase_grpc.store.leases import Lease, LeaseTable
from dase_grpc.store.policies import Policy, PolicyBoard
from dase_grpc.store.replay import ReplayStore
from dase_grpc.store.ring import RingBuffer
from dase_grpc.store.run import SharedRun

__all__ = ["Lease", "LeaseTable", "Policy", "PolicyBoard", "ReplayStore", "RingBuffer", "SharedRun"]
