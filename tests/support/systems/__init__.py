"""Start processes and whole systems, drive them, and wait for what they do."""
