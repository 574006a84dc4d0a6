"""The pages that the gateway serves: chat and fleet."""

from pdserve.gateway.web.fleet import add_fleet
from pdserve.gateway.web.pages import add_pages
