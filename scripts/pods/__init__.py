"""A rendered chart as real containers on one machine, without a cluster."""
