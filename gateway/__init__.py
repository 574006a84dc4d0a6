"""The HTTP and gRPC gateway: the APIs of OpenAI, Anthropic, Ollama and Cohere over one Service,
and its client of the router."""
