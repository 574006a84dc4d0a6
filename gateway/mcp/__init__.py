"""Tools of MCP servers, which the gateway calls for the model."""

from pdserve.gateway.mcp.config import read_config
from pdserve.gateway.mcp.servers import McpServers
from pdserve.gateway.mcp.tool_loop import McpTools
