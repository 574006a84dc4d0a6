"""The router's view of its workers."""
