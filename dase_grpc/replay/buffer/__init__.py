"""The state of a run: buffer, leases and policies. Synchronous, NumPy only; time is passed in."""
