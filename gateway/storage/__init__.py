"""The gateway's database."""

from pdserve.gateway.storage.interface import (
    KeptResponse,
    ResponseStore,
    check_text,
    check_url,
    may_be_id,
    without_nul,
)
