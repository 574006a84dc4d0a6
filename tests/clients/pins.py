"""The clients that the tests run, with their versions. No other file names them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Pin:
    """Packages of one registry, installed into one folder; the first one is the client."""

    registry: str  # npm or pypi
    packages: tuple[str, ...]

    @property
    def title(self) -> str:
        return self.packages[0]


CLAUDE_CODE = Pin("npm", ("@anthropic-ai/claude-code@2.1.197",))
CODEX = Pin("npm", ("@openai/codex@0.171.0",))
OPENCODE = Pin("npm", ("opencode-ai@1.18.33",))
AI_SDK = Pin(
    "npm",
    (
        "ai@7.0.173",
        "@ai-sdk/openai-compatible@3.0.92",
        "@ai-sdk/openai@4.0.118",
        "@ai-sdk/anthropic@4.0.105",
        "zod@4.6.7",
    ),
)
LITELLM = Pin("pypi", ("litellm==1.110.2", "openai==3.57.0"))
LANGCHAIN = Pin(
    "pypi",
    (
        "langchain-openai==1.7.4",
        "langchain-anthropic==1.7.10",
        "langchain-core==1.8.3",
        "openai==3.57.0",
        "anthropic==2.14.0",
    ),
)
OPENAI_AGENTS = Pin("pypi", ("openai-agents==0.24.0", "openai==3.57.0"))
PYDANTIC_AI = Pin(
    "pypi",
    ("pydantic-ai-slim[openai,anthropic]==2.68.0", "openai==3.57.0", "anthropic==2.14.0"),
)
INSTRUCTOR = Pin("pypi", ("instructor==1.17.0", "openai==3.3.0"))
LLM = Pin("pypi", ("llm==0.36", "openai==3.57.0"))
