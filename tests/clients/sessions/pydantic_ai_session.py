"""pydantic-ai: agents with tools, streamed, over OpenAI's two APIs and Anthropic's."""

import asyncio
from functools import partial

from pydantic_ai import Agent
from pydantic_ai.exceptions import ModelContextWindowExceededError
from pydantic_ai.messages import ModelMessage, ThinkingPart
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from session import BASE_URL, IDLE_S, KEY, MODEL, converse_async, list_files, write_file

openai = OpenAIProvider(base_url=f"{BASE_URL}/v1", api_key=KEY)
anthropic = AnthropicProvider(base_url=BASE_URL, api_key=KEY)
settings = {"timeout": IDLE_S, "max_tokens": 32000}
MODELS: list[Model] = [
    OpenAIChatModel(MODEL, provider=openai, settings=settings),
    OpenAIResponsesModel(MODEL, provider=openai, settings=settings),
    AnthropicModel(MODEL, provider=anthropic, settings=settings),
]


async def turn(agent: Agent, before: list[ModelMessage], text: str) -> tuple[str, list]:
    """Return the answer and the conversation that includes it."""
    async with agent.run_stream(text, message_history=before) as result:
        answer = await result.get_output()
        return answer, result.all_messages()


async def session(model: Model) -> None:
    agent = Agent(model, instructions="You are brief.", tools=[list_files, write_file])
    # Reasoning without a summary has its text in another field of OpenAI's responses.
    shown = (lambda _: None) if isinstance(model, OpenAIResponsesModel) else thoughts
    await converse_async(partial(turn, agent), ModelContextWindowExceededError, shown)


def thoughts(messages: list[ModelMessage]) -> str:
    parts = [part for message in messages for part in message.parts]
    return "".join(part.content for part in parts if isinstance(part, ThinkingPart))


async def main() -> None:
    for model in MODELS:
        await session(model)
        print(type(model).__name__, "ok", flush=True)


asyncio.run(main())
