"""Offers the tools of MCP servers to models, and calls these tools in the gateway."""

from pdserve.gateway.mcp.config import read_config
from pdserve.gateway.mcp.servers import McpServers
from pdserve.gateway.mcp.tool_loop import McpTools
