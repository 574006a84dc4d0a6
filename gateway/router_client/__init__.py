"""The gateway's client of the routers: it keeps a session with each router, and continues requests
on another router when a session is lost."""

from pdserve.gateway.router_client.client import RouterClient
from pdserve.gateway.router_client.routing import choose
from pdserve.gateway.router_client.upstream import Upstream, merge
