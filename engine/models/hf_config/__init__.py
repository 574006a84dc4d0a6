"""Reads config.json."""
