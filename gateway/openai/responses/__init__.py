"""OpenAI's /v1/responses: generated responses, and stored ones."""

from pdserve.gateway.openai.responses.reply import add_response_routes
