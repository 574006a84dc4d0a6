"""The gateway's database, SQLite or PostgreSQL, and the store of responses in it."""

from pdserve.gateway.storage.interface import (
    KeptResponse,
    ResponseStore,
    check_text,
    check_url,
    may_be_id,
    without_nul,
)
