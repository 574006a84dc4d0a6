"""llm: its Python API over an OpenAI-compatible server, with streaming, tools and a schema."""

import json

from conversation import BASE_URL, CITY, KEY, MODEL, QUESTION, checked
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
    answer = chat.prompt("Describe Paris as JSON.", schema=CITY, stream=False, max_tokens=100)
    return set(json.loads(answer.text())) == {"name", "inhabitants"}


def tools() -> bool:
    """The library lets the model choose, so the prompt says what to write."""
    call = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
    chain = chat.chain(
        f"{QUESTION} Repeat exactly: {call}",
        tools=[get_weather],
        options={"temperature": 0, "max_tokens": 60},
        chain_limit=4,
    )
    try:
        text = chain.text()
    except ValueError:  # it went on calling
        text = "called"
    return bool(called) and bool(text)


checked(streaming, schema, tools)
