"""The command `pdserve`: one folder or file for each subcommand."""
