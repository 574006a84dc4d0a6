"""The web pages that the gateway serves: a chat, and a live view of the fleet."""

from pdserve.gateway.web.pages import add_fleet, add_pages
