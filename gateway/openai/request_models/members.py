"""The members of a chat's unions, and how each is handled."""

from pdserve.gateway.http import OMITTED_TYPE, REFUSED_TYPE, SERVED_TYPE, EntryTypes

ROLES: EntryTypes = dict.fromkeys(
    ("system", "developer", "user", "assistant", "tool", "function"), SERVED_TYPE
)
# A part in no row is dropped from a message of the assistant, and refused elsewhere.
PARTS: EntryTypes = {
    **dict.fromkeys(("text", "input_text", "output_text", "refusal"), SERVED_TYPE),
    "thinking": SERVED_TYPE,  # from the assistant
    **dict.fromkeys(("image_url", "input_audio", "file", "video_url"), REFUSED_TYPE),
}
CALLS: EntryTypes = {"function": SERVED_TYPE, "custom": SERVED_TYPE}
# A tool in no row is a provider's, and left out.
TOOLS: EntryTypes = {
    "function": SERVED_TYPE,
    "custom": SERVED_TYPE,
    **dict.fromkeys(("web_search", "code_interpreter", "builtin_function", "mcp"), OMITTED_TYPE),
}
# The modes may be objects that have only their type; "any" is another name of "required".
TOOL_CHOICES: EntryTypes = dict.fromkeys(
    ("none", "auto", "required", "any", "function", "custom", "allowed_tools"), SERVED_TYPE
)

UNIONS: dict[str, EntryTypes] = {
    "roles": ROLES,
    "content parts": PARTS,
    "calls": CALLS,
    "tools": TOOLS,
    "tool choices": TOOL_CHOICES,
}
