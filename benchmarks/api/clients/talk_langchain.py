"""LangChain's ChatOpenAI: streaming, bind_tools and with_structured_output."""

from conversation import BASE_URL, CITY, KEY, MODEL, QUESTION, WEATHER, checked, is_weather
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

chat = ChatOpenAI(base_url=f"{BASE_URL}/v1", api_key=KEY, model=MODEL, max_tokens=400)
TOOL = {"name": "get_weather", "description": "The weather in a city", "parameters": WEATHER}
CITY_SCHEMA = {"title": "city", "description": "A city", **CITY}


def streaming() -> bool:
    pieces = [piece.content for piece in chat.stream("Name three rivers.")]
    return len(pieces) > 3 and bool("".join(pieces))


def bind_tools() -> bool:
    bound = chat.bind_tools([TOOL], tool_choice="any")
    asked = bound.invoke(QUESTION)
    call = asked.tool_calls[0]
    result = ToolMessage("18 degrees", tool_call_id=call["id"])
    answer = chat.invoke([HumanMessage(QUESTION), asked, result])
    return is_weather(call["args"]) and bool(answer.content)


def bind_tools_streamed() -> bool:
    bound = chat.bind_tools([TOOL], tool_choice="get_weather")
    whole = None
    for piece in bound.stream(QUESTION):
        whole = piece if whole is None else whole + piece
    return is_weather(whole.tool_calls[0]["args"])


def structured_by_schema() -> bool:
    answer = chat.with_structured_output(CITY_SCHEMA, method="json_schema", strict=True).invoke(
        "Describe Paris as JSON."
    )
    return set(answer) == {"name", "inhabitants"}


def structured_by_function() -> bool:
    answer = chat.with_structured_output(CITY_SCHEMA, method="function_calling").invoke(
        "Describe Paris."
    )
    return set(answer) == {"name", "inhabitants"}


checked(streaming, bind_tools, bind_tools_streamed, structured_by_schema, structured_by_function)
