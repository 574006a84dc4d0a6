"""openai-agents: an agent with tools and a session, over the chat and responses APIs."""

import asyncio
from functools import partial

import openai
from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from session import BASE_URL, IDLE_S, KEY, MODEL, converse_async, list_files, write_file

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=f"{BASE_URL}/v1", api_key=KEY, timeout=IDLE_S, max_retries=0)
tools = [function_tool(list_files), function_tool(write_file)]


async def turn(agent: Agent, before: list, text: str) -> tuple[str, list]:
    """Return the answer and the conversation that includes it."""
    result = Runner.run_streamed(agent, [*before, {"role": "user", "content": text}])
    try:
        async for _ in result.stream_events():
            pass
    except openai.BadRequestError as error:
        if error.code != "context_length_exceeded":
            raise AssertionError(error.code) from error
        raise
    return result.final_output, result.to_input_list()


async def main() -> None:
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        model = kind(model=MODEL, openai_client=client)
        agent = Agent(name="agent", instructions="You are brief.", model=model, tools=tools)
        await converse_async(partial(turn, agent), openai.BadRequestError)
        print(kind.__name__, "ok", flush=True)


asyncio.run(main())
