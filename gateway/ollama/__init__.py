"""Ollama's API: chats, single prompts, embeddings and the list of models, over the Service that all
APIs share."""

from pdserve.gateway.ollama.api import OllamaApi
