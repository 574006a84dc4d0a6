"""The decode worker: receives KV, generates tokens, migrates requests."""

from pdserve.services.decode.servicer import run
