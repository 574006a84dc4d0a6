"""The members of Anthropic's unions, including betas, and how each is handled."""

from pdserve.gateway.requests.members import (
    DROPPED,
    HINT,
    LEFT_OUT,
    REFUSED,
    SERVED,
    Member,
    Table,
    kept,
)

ROLES: Table = {"user": SERVED, "assistant": SERVED, "system": SERVED}

# Results of a provider's own tools, and related blocks.
_HISTORY: dict[str, Member] = {
    "server_tool_use": kept("name", "input"),
    "mcp_tool_use": kept("server_name", "name", "input"),
    **dict.fromkeys(
        (
            "web_search_tool_result", "web_fetch_tool_result", "advisor_tool_result",
            "code_execution_tool_result", "bash_code_execution_tool_result",
            "text_editor_code_execution_tool_result", "tool_search_tool_result",
            "mcp_tool_result",
        ),
        kept("content"),
    ),
    "compaction": kept("content"),
    "redacted_thinking": DROPPED,
    "fallback": DROPPED,
    "mcp_tool_listing": DROPPED,
    "tool_addition": DROPPED,  # every tool of the request is offered from the start
    "tool_removal": REFUSED,
    "image": REFUSED,
    "container_upload": REFUSED,
}  # fmt: skip
_TEXTS: dict[str, Member] = {
    "text": SERVED,
    "search_result": kept("title", "source", "content", of_client=True),
    "document": kept("title", "context", "source", of_client=True),
}
# Of documents. The text of a source that is served is kept.
SOURCES: Table = {
    "text": SERVED,
    "content": SERVED,
    **dict.fromkeys(("base64", "url", "file"), REFUSED),
}
SOURCE_BLOCKS: Table = {"text": SERVED, "image": REFUSED}
USER_BLOCKS: Table = {
    **_TEXTS,
    "tool_result": SERVED,
    "thinking": DROPPED,
    "tool_use": REFUSED,
    **_HISTORY,
}
# A block in no row is history, and dropped.
ASSISTANT_BLOCKS: Table = {
    **_TEXTS,
    "thinking": SERVED,
    "tool_use": SERVED,
    "tool_result": REFUSED,
    **_HISTORY,
}
SYSTEM_BLOCKS: Table = {
    "text": SERVED,
    "tool_addition": DROPPED,
    "tool_removal": REFUSED,
}
RESULT_BLOCKS: Table = {
    **_TEXTS,
    "tool_reference": kept("tool_name"),
    "browser_state": kept("tabs", "state_changes"),
    "image": REFUSED,
}

# A tool in no row is the provider's, and left out.
TOOLS: Table = {
    "custom": SERVED,
    "function": REFUSED,  # OpenAI's form
    **dict.fromkeys(
        (
            "advisor_20260301", "bash_20241022", "bash_20250124", "browser_toolset_20260801",
            "code_execution_20250522", "code_execution_20250825", "code_execution_20260120",
            "code_execution_20260521", "computer_20241022", "computer_20250124",
            "computer_20251124", "computer_toolset_20260801", "mcp_toolset", "memory_20250818",
            "text_editor_20241022", "text_editor_20250124", "text_editor_20250429",
            "text_editor_20250728", "tool_search_tool_bm25", "tool_search_tool_bm25_20251119",
            "tool_search_tool_regex", "tool_search_tool_regex_20251119", "web_fetch_20250910",
            "web_fetch_20260209", "web_fetch_20260309", "web_fetch_20260318",
            "web_search_20250305", "web_search_20260209", "web_search_20260318",
        ),
        LEFT_OUT,
    ),
}  # fmt: skip
TOOL_CHOICES: Table = {"auto": SERVED, "any": SERVED, "tool": SERVED, "none": SERVED}
THINKING: Table = {
    "enabled": SERVED,
    "auto": SERVED,  # another name of "adaptive"
    "adaptive": SERVED,
    "disabled": SERVED,
    "between_tools": HINT,
}
# Of context_management. Prompts are never shortened.
EDITS: Table = dict.fromkeys(
    ("clear_tool_uses_20250919", "clear_thinking_20251015", "compact_20260112"), HINT
)

UNIONS: dict[str, Table] = {
    "roles": ROLES,
    "blocks of the user": USER_BLOCKS,
    "blocks of the assistant": ASSISTANT_BLOCKS,
    "blocks of a system message": SYSTEM_BLOCKS,
    "blocks of a tool's result": RESULT_BLOCKS,
    "sources of a document": SOURCES,
    "blocks of a document's content": SOURCE_BLOCKS,
    "tools": TOOLS,
    "tool choices": TOOL_CHOICES,
    "thinking": THINKING,
    "edits of the context": EDITS,
}
