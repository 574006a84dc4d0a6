"""Tools of MCP servers, which the gateway calls for the model."""
