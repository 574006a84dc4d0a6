"""The members of a chat's unions, and how each is handled."""

from pdserve.gateway.http import LEFT_OUT, REFUSED, SERVED, Table

ROLES: Table = dict.fromkeys(
    ("system", "developer", "user", "assistant", "tool", "function"), SERVED
)
# A part in no row is dropped from a message of the assistant, and refused elsewhere.
PARTS: Table = {
    **dict.fromkeys(("text", "input_text", "output_text", "refusal"), SERVED),
    "thinking": SERVED,  # from the assistant
    **dict.fromkeys(("image_url", "input_audio", "file", "video_url"), REFUSED),
}
CALLS: Table = {"function": SERVED, "custom": SERVED}
# A tool in no row is a provider's, and left out.
TOOLS: Table = {
    "function": SERVED,
    "custom": SERVED,
    **dict.fromkeys(("web_search", "code_interpreter", "builtin_function", "mcp"), LEFT_OUT),
}
# The modes may be objects that have only their type; "any" is another name of "required".
TOOL_CHOICES: Table = dict.fromkeys(
    ("none", "auto", "required", "any", "function", "custom", "allowed_tools"), SERVED
)

UNIONS: dict[str, Table] = {
    "roles": ROLES,
    "content parts": PARTS,
    "calls": CALLS,
    "tools": TOOLS,
    "tool choices": TOOL_CHOICES,
}
