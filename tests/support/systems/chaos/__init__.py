"""Real processes that are killed, stopped and cut off while streams run, and what shows it."""
