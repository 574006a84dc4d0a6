"""The gateway's database."""

from pdserve.gateway.storage.response_store import KeptResponse, ResponseStore
from pdserve.gateway.storage.text import check_text, may_be_id, without_nul
from pdserve.gateway.storage.url import check_url
