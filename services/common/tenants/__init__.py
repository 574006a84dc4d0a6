"""API keys, rate limits, and fairness between them."""
