"""`pdserve bench`: load for a running server, and its measurements."""
