"""Names of offered tools, and how they join a client's tools."""

import re

from pdserve.gateway.mcp.offer import OfferedTool, ServerTool, offered_tools, with_offered
from pdserve.text import Tool, ToolUse


def listed(*names: str, server: str = "s") -> tuple[OfferedTool, ...]:
    return offered_tools((server, ServerTool(name, "", {}), True) for name in names)


def test_offered_names_are_valid_function_names() -> None:
    long = "x" * 80
    offered = offered_tools(
        (server, ServerTool(name, "", {}), False)
        for server, name in [
            ("a b", "get.it"),
            ("a_b", "get/it"),
            ("é", "é"),
            ("s", long),
            ("s", long + "y"),
        ]
    )
    names = [one.tool.name for one in offered]
    assert names[:3] == ["a_b__get_it", "a_b__get_it_2", "____"]
    assert all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name) for name in names)
    assert len(set(names)) == 5
    assert [one.name for one in offered] == ["get.it", "get/it", "é", long, long + "y"]


def test_client_tools_come_first_and_keep_their_names() -> None:
    mine = ToolUse([Tool("zeta"), Tool("s__a", "mine")])
    use, added = with_offered(mine, listed("a", "b"))
    assert use is not None
    assert [(tool.name, tool.description) for tool in use.tools] == [
        ("zeta", ""), ("s__a", "mine"), ("s__b", "")
    ]  # fmt: skip
    assert list(added) == ["s__b"]
    use, added = with_offered(None, listed("a"))
    assert use is not None
    assert (list(added), use.choice) == (["s__a"], "auto")


def test_tool_choice_refers_to_client_tools_only() -> None:
    use, added = with_offered(ToolUse([Tool("m")], "required"), listed("a"))
    assert use is not None
    assert (use.only, list(added)) == (("m",), ["s__a"])
    use, _ = with_offered(ToolUse([Tool("m"), Tool("n")], "required", ["n"]), listed("a"))
    assert use is not None
    assert use.only == ("n",)
    for none in (ToolUse([Tool("m")], "none"), ToolUse([], "required")):
        assert with_offered(none, listed("a")) == (none, {})
