"""Tokenizer workers: processes that render templates and tokenize, so that no text of a client
blocks the gateway."""
