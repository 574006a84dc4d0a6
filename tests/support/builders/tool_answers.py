"""Tool calls of each family of models.

A row has a call of get_weather for Paris, two calls, and the text that identifies the family's
chat template.
"""

from typing import NamedTuple

DS_BEGIN, DS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DS_CALL, DS_CALL_END, DS_SEPARATOR = (
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)


class ToolAnswer(NamedTuple):
    """Calls as the model writes them: `call` for Paris, `calls` for Paris, then for Rome; `cut` is
    an unfinished one; `known_by` a piece of its chat template.
    """

    call: str
    calls: str
    cut: str
    known_by: str


def _repeated(call: str, before: str, after: str, between: str, known_by: str) -> ToolAnswer:
    one, other = call.replace("CITY", "Paris"), call.replace("CITY", "Rome")
    whole = before + one + after
    return ToolAnswer(
        whole,
        before + one + between + other + after,
        whole[: len(before) + len(one) // 2],
        known_by,
    )


def _dsml(prefix: str, name: str) -> ToolAnswer:
    call = (
        f'<{prefix}invoke name="get_weather">\n<{prefix}parameter name="city" string="true">CITY'
        f"</{prefix}parameter>\n</{prefix}invoke>\n"
    )
    return _repeated(call, f"<｜DSML｜{name}>\n", f"</｜DSML｜{name}>", "", "｜DSML｜")


_JSON = '{"name": "get_weather", "arguments": {"city": "CITY"}}'
_LLAMA = '{"name": "get_weather", "parameters": {"city": "CITY"}}'
_ARGUMENTS = '{"city": "CITY"}'

TOOL_ANSWERS = {
    "hermes": _repeated(f"<tool_call>\n{_JSON}\n</tool_call>", "", "", "\n", "<tool_call>"),
    "qwen3_coder": _repeated(
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nCITY\n</parameter>\n</function>\n"
        "</tool_call>", "", "", "\n", "<tool_call>\n<function=example>\n<parameter=a>",
    ),
    "seed_oss": _repeated(
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>CITY</parameter>\n</function>\n"
        "</seed:tool_call>", "", "", "\n", "<seed:tool_call>\n<function=example>\n<parameter=a>",
    ),
    "llama3_json": _repeated(_LLAMA, "", "", "; ", "<|start_header_id|>"),
    "llama4_pythonic": _repeated("get_weather(city='CITY')", "[", "]", ", ", "<|header_start|>"),
    "mistral": _repeated(f"[TOOL_CALLS]get_weather[ARGS]{_ARGUMENTS}", "", "", "", "[TOOL_CALLS]"),
    "deepseek_v3": _repeated(
        f"{DS_CALL}function{DS_SEPARATOR}get_weather\n```json\n{_ARGUMENTS}\n```{DS_CALL_END}",
        DS_BEGIN, DS_END, "\n", f"{DS_BEGIN} ```json",
    ),
    "deepseek_v31": _repeated(
        f"{DS_CALL}get_weather{DS_SEPARATOR}{_ARGUMENTS}{DS_CALL_END}",
        DS_BEGIN, DS_END, "", DS_BEGIN,
    ),
    "deepseek_dsml": _dsml("｜DSML｜", "function_calls"),
    "glm45": _repeated(
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>CITY</arg_value>\n</tool_call>",
        "", "", "\n", "<tool_call>{name}\n<arg_key>",
    ),
    "minimax_m2": _repeated(
        '<invoke name="get_weather">\n<parameter name="city">CITY</parameter>\n</invoke>\n',
        "<minimax:tool_call>\n", "</minimax:tool_call>", "", "<minimax:tool_call>",
    ),
    "gemma4": _repeated(
        '<|tool_call>call:get_weather{city:<|"|>CITY<|"|>}<tool_call|>', "", "", "", "<|tool_call>",
    ),
    "phi4_mini_json": _repeated(_JSON, "functools[", "]", ", ", "<|tool|>"),
    "kimi_k2": _repeated(
        "<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{_ARGUMENTS}<|tool_call_end|>",
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "",
        "<|tool_calls_section_begin|>",
    ),
    "gpt_oss": _repeated(
        f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{_ARGUMENTS}",
        "", "", "<|call|><|start|>assistant", "<|channel|> <|message|>",
    ),
    "gigachat3": _repeated(
        f"<|function_call|>{_JSON}", "", "", "<|message_sep|>\n\n", "<|role_sep|>",
    ),
    "jamba": _repeated(_JSON, "<tool_calls>[\n", "\n]</tool_calls>", ",\n", "<tool_calls>"),
    "nemotron": _repeated(_JSON, "<TOOLCALL>[", "]</TOOLCALL>", ", ", "<TOOLCALL>"),
    "internlm2": _repeated(
        f"<|action_start|><|plugin|>\n{_LLAMA}<|action_end|>", "", "", "\n", "<|plugin|>",
    ),
    "command_a": _repeated(
        '{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "CITY"}}',
        "<|START_ACTION|>[\n", "\n]<|END_ACTION|>", ",\n", "<|START_ACTION|>",
    ),
    "command_r": _repeated(
        '{"tool_name": "get_weather", "parameters": {"city": "CITY"}}',
        "Action: ```json\n[\n", "\n]```", ",\n", "Action: ```json",
    ),
    "apertus": _repeated(
        '{"get_weather": {"city": "CITY"}}',
        "<|tools_prefix|>[", "]<|tools_suffix|>", ", ", "<|tools_prefix|>",
    )._replace(cut='<|tools_prefix|>[{"get_wea'),
    "olmo3": _repeated(
        'get_weather(city="CITY")',
        "<function_calls>\n", "\n</function_calls>", "\n", "<function_calls>",
    ),
    "lfm2": _repeated(
        'get_weather(city="CITY")',
        "<|tool_call_start|>[", "]<|tool_call_end|>", ", ", "<|tool_list_start|>",
    ),
    "pythonic": _repeated('get_weather(city="CITY")', "[", "]", ", ", ""),
    "step3": _repeated(
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="get_weather">'
        '<steptml:parameter name="city">CITY</steptml:parameter></steptml:invoke>'
        "<｜tool_call_end｜>",
        "<｜tool_calls_begin｜>", "<｜tool_calls_end｜>", "\n", "<steptml:invoke>",
    ),
    "functiongemma": _repeated(
        "<start_function_call>call:get_weather{city:<escape>CITY<escape>}<end_function_call>",
        "", "", "", "<start_function_call>",
    ),
    "minimax_m3": _repeated(
        ']<]minimax[>[<invoke name="get_weather">]<]minimax[>[<city>CITY]<]minimax[>[</city>'
        "]<]minimax[>[</invoke>\n",
        "]<]minimax[>[<tool_call>\n", "]<]minimax[>[</tool_call>", "", "]<]minimax[>[",
    ),
    "kimi_k3": _repeated(
        '<|open|>call tool="get_weather" index="1"<|sep|><|open|>argument key="city" '
        'type="string"<|sep|>CITY<|close|>argument<|sep|><|close|>call<|sep|>',
        "<|open|>tools<|sep|>", "<|close|>tools<|sep|>", "", "<|open|>",
    ),
    "hy3": _repeated(
        "<tool_call:opensource>get_weather<tool_sep:opensource>\n<arg_key:opensource>city"
        "</arg_key:opensource>\n<arg_value:opensource>CITY</arg_value:opensource>\n"
        "</tool_call:opensource>\n",
        "<tool_calls:opensource>\n", "</tool_calls:opensource>", "", "<tool_sep{}>",
    ),
    "solar": _repeated(
        "<|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>get_weather<|tool_call:args|>"
        f"{_ARGUMENTS}<|tool_call:end|>",
        "", "", "", "<|tool_call:name|>",
    ),
    "minicpm5": _repeated(
        '<function name="get_weather"><param name="city">CITY</param></function>',
        "", "", "\n", '<function name="',
    ),
    "functionary": _repeated(f">>>get_weather\n{_ARGUMENTS}", "", "", "", ">>>${recipient}"),
    "muse_glimmer": _repeated(
        '<atem:invoke name="get_weather">\n<atem:parameter name="city">CITY</atem:parameter>\n'
        "</atem:invoke>\n",
        "to=get_weather<|message|><atem:function_calls>\n", "</atem:function_calls>", "",
        "<atem:function_calls>",
    ),
    "json": _repeated(_JSON, "[", "]", ", ", ""),
    "generic": _repeated(f"<tool_call>\n{_JSON}\n</tool_call>", "", "", "\n", ""),
}  # fmt: skip
