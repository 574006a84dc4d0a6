"""Options of the commands: their values from flags, environment and files, and their help."""
