"""The Python API: `pdserve.LLM`, and `pdserve.Engine` for asyncio."""
