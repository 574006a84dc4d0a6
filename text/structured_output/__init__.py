"""Compiles the structure that an answer must have (JSON schema, grammar, regex, choice)."""
