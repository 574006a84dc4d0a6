"""Ollama's API: chats, single prompts, embeddings and the list of models, over the same Service as
the other APIs."""
