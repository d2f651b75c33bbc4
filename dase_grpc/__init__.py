"""DASE: K deterministic actor-critics on one shared replay buffer over gRPC."""
