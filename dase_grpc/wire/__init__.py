"""The protocols: gRPC servicers and their clients."""
