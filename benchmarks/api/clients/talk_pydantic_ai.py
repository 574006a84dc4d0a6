"""pydantic-ai: an agent that streams, one with typed output, and a tool call."""

import asyncio
from typing import Literal

from conversation import BASE_URL, KEY, MODEL, QUESTION, WEATHER, checked, is_weather
from pydantic import BaseModel, ConfigDict, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.direct import model_request_sync
from pydantic_ai.messages import ModelRequest, ToolCallPart, ToolReturnPart
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.tools import ToolDefinition

provider = OpenAIProvider(base_url=f"{BASE_URL}/v1", api_key=KEY)
model = OpenAIChatModel(MODEL, provider=provider, settings={"max_tokens": 400})


class Weather(BaseModel):
    """The weather in a city."""

    model_config = ConfigDict(extra="forbid")  # a small model would add fields without end

    city: str = Field(max_length=20)
    unit: Literal["celsius", "fahrenheit"]


def streaming() -> bool:
    async def run() -> list[str]:
        async with Agent(model).run_stream("Name three rivers.") as result:
            return [piece async for piece in result.stream_text(delta=True, debounce_by=None)]

    return len(asyncio.run(run())) > 3


def tools() -> bool:
    tool = ToolDefinition(name="get_weather", parameters_json_schema=WEATHER)
    question = ModelRequest.user_text_prompt(QUESTION)
    must_call = ModelRequestParameters(function_tools=[tool], allow_text_output=False)
    asked = model_request_sync(model, [question], model_request_parameters=must_call)
    call = next(part for part in asked.parts if isinstance(part, ToolCallPart))
    result = ToolReturnPart("get_weather", "18 degrees", tool_call_id=call.tool_call_id)
    answer = model_request_sync(model, [question, asked, ModelRequest(parts=[result])])
    return is_weather(call.args_as_dict()) and bool(answer.text)


def output_by_tool() -> bool:
    answer = Agent(model, output_type=ToolOutput(Weather)).run_sync(QUESTION)
    return answer.output.unit in ("celsius", "fahrenheit")


def output_by_schema() -> bool:
    answer = Agent(model, output_type=NativeOutput(Weather)).run_sync(QUESTION)
    return answer.output.unit in ("celsius", "fahrenheit")


checked(streaming, tools, output_by_tool, output_by_schema)
