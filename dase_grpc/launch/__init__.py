"""Starting runs: a local cluster, lockstep, evaluation."""
