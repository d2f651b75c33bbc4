"""The server's side: servicers, interceptors, limits."""
