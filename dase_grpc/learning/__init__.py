"""How agents learn: environments, agents, similarity, training. No network."""
