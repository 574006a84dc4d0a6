"""The calls of DeepSeek V3.2 and later: invocations whose tags begin with ｜DSML｜."""

from pdserve.text.parsing import BlockReader, CallForm, Calls, ToolFamily, ToolSchemas, read_invokes

DSML = "｜DSML｜"
# V3.2, V4, and V4.1 with a space in its tags.
_BLOCKS = {f"{DSML}function_calls": DSML, f"{DSML}tool_calls": DSML, f"{DSML} calls": f"{DSML} "}


def read(reader: BlockReader, opener: str, schemas: ToolSchemas) -> Calls:
    name = opener[1:-1]
    return read_invokes(reader, _BLOCKS[name], f"</{name}>", schemas)


FAMILY = ToolFamily(
    "deepseek_dsml",
    lambda template: DSML in template,
    CallForm(
        f'<{DSML}function_calls>{{"name": "NAME", "arguments": ',
        f"}}</{DSML}function_calls>",
        trigger=f"<{DSML}function_calls>",
    ),
    openers=tuple(f"<{name}>" for name in _BLOCKS),
    read=read,
    special=(DSML,),
)
