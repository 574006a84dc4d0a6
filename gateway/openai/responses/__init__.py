"""/v1/responses."""

from pdserve.gateway.openai.responses.reply import add_response_routes
