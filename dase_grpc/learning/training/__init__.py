"""The learner: explore, store, sample, weigh, update, evaluate."""
