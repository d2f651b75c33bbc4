"""Prometheus metrics of every role, and the endpoint that serves them."""
