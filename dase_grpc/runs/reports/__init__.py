"""Reports of runs, and comparisons of several."""
