"""From messages to token ids and back, for gateway, picker and Python API."""
