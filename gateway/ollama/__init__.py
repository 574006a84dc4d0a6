"""Ollama's HTTP API: chats, single prompts, embeddings and the list of models."""

from pdserve.gateway.ollama.api import OllamaApi
