"""The command line program `pdserve`: one module or package for each of its commands."""
