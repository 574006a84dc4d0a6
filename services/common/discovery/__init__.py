"""Finds the addresses of routers and workers."""
