"""What an observer sees of a cluster: its status read, told in words, and drawn."""
