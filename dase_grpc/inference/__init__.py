"""Inference: a trained policy behind a service, and the client of one."""
