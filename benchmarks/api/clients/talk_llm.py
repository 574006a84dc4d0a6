"""llm: its Python API over an OpenAI-compatible server, with streaming, tools and a schema."""

import json
from contextlib import suppress

from conversation import BASE_URL, CITY, KEY, MODEL, checked
from llm.default_plugins.openai_models import Chat

chat = Chat(
    MODEL,
    model_name=MODEL,
    api_base=f"{BASE_URL}/v1",
    supports_schema=True,
    supports_tools=True,
)
chat.key = KEY
called: list[str] = []


def get_weather(city: str) -> str:
    """The weather in a city."""
    called.append(city)
    return "18 degrees"


def streaming() -> bool:
    pieces = list(chat.prompt("Name three rivers.", stream=True, max_tokens=30))
    return len(pieces) > 3


def schema() -> bool:
    answer = chat.prompt("Describe Paris as JSON.", schema=CITY, stream=False, max_tokens=400)
    return set(json.loads(answer.text())) == {"name", "inhabitants"}


def tools() -> bool:
    """Call a tool. The library leaves the choice to the model, which is small, so the prompt
    dictates the call. The model then repeats it, so the chain ends at its limit after the tool has
    run."""
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    chain = chat.conversation(chain_limit=2).chain(
        f"Repeat after me.\n{call}",
        tools=[get_weather],
        options={"temperature": 0, "max_tokens": 60},
    )
    answers = []
    with suppress(ValueError):
        answers += chain.responses()
    first = answers[0].tool_calls()[0]
    return called[0] == "Paris" and first.arguments == {"city": "Paris"}


checked(streaming, schema, tools)
