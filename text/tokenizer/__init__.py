"""Tokenizers: text to ids, and ids to text."""
