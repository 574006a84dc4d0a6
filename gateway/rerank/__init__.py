"""Rerank and score routes, with Cohere's and vLLM's fields."""

from pdserve.gateway.rerank.api import RerankApi
