"""Routes that score documents: /rerank with Cohere's fields, and /score with vLLM's."""

from pdserve.gateway.rerank.api import RerankApi
