"""Real processes that are killed, stopped and cut off under load."""
