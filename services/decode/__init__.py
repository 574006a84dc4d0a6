"""The decode worker: receives KV, generates tokens, migrates requests."""
