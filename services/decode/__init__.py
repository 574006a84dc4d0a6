"""The decode worker: receives KV, generates tokens, migrates requests."""

from pdserve.services.decode.main import run
