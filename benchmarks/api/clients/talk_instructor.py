"""instructor: typed answers through a tool and through a JSON schema, whole and partial."""

from typing import Literal

import instructor
from conversation import BASE_URL, KEY, MODEL, QUESTION, checked
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field

client = OpenAI(base_url=f"{BASE_URL}/v1", api_key=KEY)


class Weather(BaseModel):
    """The weather in a city."""

    model_config = ConfigDict(extra="forbid")  # a small model would add fields without end

    city: str = Field(max_length=20)
    unit: Literal["celsius", "fahrenheit"]


def ask(mode: instructor.Mode) -> Weather:
    asker = instructor.from_openai(client, mode=mode)
    return asker.chat.completions.create(
        model=MODEL,
        response_model=Weather,
        max_tokens=400,
        max_retries=0,
        messages=[{"role": "user", "content": QUESTION}],
    )


def tools() -> bool:
    return ask(instructor.Mode.TOOLS).unit in ("celsius", "fahrenheit")


def schema() -> bool:
    return ask(instructor.Mode.JSON_SCHEMA).unit in ("celsius", "fahrenheit")


def streaming() -> bool:
    asker = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    parts = list(
        asker.chat.completions.create_partial(
            model=MODEL,
            response_model=Weather,
            max_tokens=400,
            messages=[{"role": "user", "content": QUESTION}],
        )
    )
    return len(parts) > 1 and parts[-1].unit in ("celsius", "fahrenheit")


checked(tools, schema, streaming)
