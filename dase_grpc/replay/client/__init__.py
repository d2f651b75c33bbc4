"""The client's side: joining, streams that begin again, shards."""
