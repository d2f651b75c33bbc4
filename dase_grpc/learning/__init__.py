"""Learning: environments, agents, similarity, training. No network."""
