"""The routes of files, batches and usage, which need a database."""
