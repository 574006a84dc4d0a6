"""The pages that the gateway serves: chat and fleet."""

from pdserve.gateway.web.pages import add_fleet, add_pages
