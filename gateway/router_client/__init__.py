"""The gateway's client of the router: sessions, and requests that survive a lost one."""

from pdserve.gateway.router_client.client import RouterClient
from pdserve.gateway.router_client.routing import choose
from pdserve.gateway.router_client.upstream import Upstream, merge
