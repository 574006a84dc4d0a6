"""The members of the unions of /v1/responses, and how each is handled."""

from pdserve.gateway.requests.members import (
    DROPPED,
    LEFT_OUT,
    REFUSED,
    SERVED,
    Table,
    kept,
)

ROLES: Table = dict.fromkeys(("user", "assistant", "system", "developer"), SERVED)

# A part in no row is dropped from a message of the assistant, and refused elsewhere.
PARTS: Table = {
    **dict.fromkeys(
        ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text"), SERVED
    ),
    "encrypted_content": DROPPED,
    **dict.fromkeys(("input_image", "input_file", "input_audio"), REFUSED),
}

ITEMS: Table = {
    **dict.fromkeys(
        (
            "message", "function_call", "function_call_output", "custom_tool_call",
            "custom_tool_call_output", "reasoning", "item_reference", "additional_tools",
            "tool_search_output", "configuration_update",
        ),
        SERVED,
    ),
    "file_search_call": kept("queries", "results"),
    "web_search_call": kept("action"),
    "code_interpreter_call": kept("code", "outputs"),
    "image_generation_call": kept("revised_prompt"),
    "tool_search_call": kept("arguments"),
    "computer_call": kept("action", "actions"),
    "computer_call_output": kept("output", of_client=True),
    "local_shell_call": kept("action"),
    "local_shell_call_output": kept("output", of_client=True),
    "shell_call": kept("action"),
    "shell_call_output": kept("output", of_client=True),
    "apply_patch_call": kept("operation"),
    "apply_patch_call_output": kept("status", "output", of_client=True),
    "mcp_call": kept("server_label", "name", "arguments", "output", "error"),
    "mcp_approval_request": kept("server_label", "name", "arguments"),
    "mcp_approval_response": kept("approve", "reason", of_client=True),
    "program": kept("code"),
    "program_output": kept("result"),
    "agent_message": kept("author", "content", of_client=True),  # from Codex
    "mcp_list_tools": DROPPED,
    "compaction": DROPPED,  # encrypted
    "context_compaction": DROPPED,
    "compaction_trigger": REFUSED,
}  # fmt: skip
UNKNOWN_ITEM = kept("content", "text", "name", "arguments", "input", "action", "output", "result")

# A tool in no row is the provider's, and left out.
TOOLS: Table = {
    "function": SERVED,
    "custom": SERVED,
    "namespace": SERVED,
    **dict.fromkeys(
        (
            "apply_patch", "code_interpreter", "computer", "computer_use_preview", "file_search",
            "image_generation", "local_shell", "mcp", "programmatic_tool_calling", "shell",
            "tool_search", "web_search", "web_search_2025_08_26", "web_search_preview",
            "web_search_preview_2025_03_11",
        ),
        LEFT_OUT,
    ),
}  # fmt: skip
# The modes may be objects that have only their type.
TOOL_CHOICES: Table = {
    **dict.fromkeys(
        ("none", "auto", "required", "function", "custom", "namespace", "allowed_tools"), SERVED
    ),
    **dict.fromkeys(
        (
            "apply_patch", "code_interpreter", "computer", "computer_use", "computer_use_preview",
            "file_search", "image_generation", "mcp", "programmatic_tool_calling", "shell",
            "web_search_preview", "web_search_preview_2025_03_11",
        ),
        REFUSED,
    ),
}  # fmt: skip

UNIONS: dict[str, Table] = {
    "roles": ROLES,
    "content parts": PARTS,
    "input items": ITEMS,
    "tools": TOOLS,
    "tool choices": TOOL_CHOICES,
}
