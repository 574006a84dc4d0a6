"""The decode worker service: receives KV from prefill workers, generates tokens, and migrates
requests to other decode workers."""
