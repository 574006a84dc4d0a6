"""/v1/responses."""

from pdserve.gateway.openai.responses.routes import add_response_routes
