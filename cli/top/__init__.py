"""`pdserve top`: the workers of a running server."""
