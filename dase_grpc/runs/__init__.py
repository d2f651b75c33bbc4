"""A run on disk: directory, checkpoints, report."""
