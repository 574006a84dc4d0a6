"""OpenAI's API: chats, completions, embeddings, models."""
