"""The view of an observer: a cluster's status read, told in words, and drawn."""
