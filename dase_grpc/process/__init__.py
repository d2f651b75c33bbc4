"""A process: signals, orphans, hangs, exit codes, and what an environment may not do to it."""
