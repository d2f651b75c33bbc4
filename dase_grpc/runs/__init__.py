"""A run on disk. What is damaged, missing or refused by the disk is a RunDirectoryError in one sentence."""
