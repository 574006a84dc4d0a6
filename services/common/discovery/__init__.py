"""Finds the addresses of routers and workers."""

from pdserve.services.common.discovery.discovery import Discovery
from pdserve.services.common.discovery.rendezvous import first_that_count, rendezvous_order, weight
from pdserve.services.common.discovery.target import check_targets
