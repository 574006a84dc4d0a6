"""LangChain: ChatOpenAI with chats and responses, and ChatAnthropic; streamed, with tools."""

from functools import partial

from langchain_anthropic import ChatAnthropic
from langchain_core.exceptions import ContextOverflowError
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from session import BASE_URL, IDLE_S, KEY, MODEL, converse, list_files, run_tool, write_file

common = {"model": MODEL, "api_key": KEY, "timeout": IDLE_S, "max_retries": 0}
MODELS = {
    "chat": ChatOpenAI(base_url=f"{BASE_URL}/v1", **common),
    "responses": ChatOpenAI(base_url=f"{BASE_URL}/v1", use_responses_api=True, **common),
    "anthropic": ChatAnthropic(
        base_url=BASE_URL,
        max_tokens=64000,
        thinking={"type": "enabled", "budget_tokens": 1024},
        **common,
    ),
}


def turn(chat: BaseChatModel, messages: list[BaseMessage], text: str) -> str:
    messages.append(HumanMessage(text))
    while True:
        message = None
        for piece in chat.stream(messages):
            message = piece if message is None else message + piece
        messages.append(message)
        if not message.tool_calls:
            return message.text
        for call in message.tool_calls:
            result = run_tool(call["name"], call["args"])
            messages.append(ToolMessage(result, tool_call_id=call["id"]))


for name, model in MODELS.items():
    chat = model.bind_tools([tool(list_files), tool(write_file)])
    converse(partial(turn, chat), [SystemMessage("You are brief.")], ContextOverflowError)
    print(name, "ok", flush=True)
