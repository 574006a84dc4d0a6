"""Migration of running requests to other decode workers."""
