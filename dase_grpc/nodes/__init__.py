"""Processes with a role: replay, learner, actor, evaluator."""
