"""The HTTP and gRPC gateway: the APIs of OpenAI, Anthropic, Ollama and Cohere over one Service,
and its client of the router. Rate limits and API keys are in services/common, chat templates and
JSON schemas in text."""
