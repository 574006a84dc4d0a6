"""Rerank and score routes, with Cohere's and vLLM's fields."""
