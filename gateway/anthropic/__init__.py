"""Anthropic's HTTP API: messages and token counts."""

from pdserve.gateway.anthropic.api import AnthropicApi
