"""instructor: typed answers by a tool and by a schema in one conversation.

Answers are streamed, one of them long, and whole after a prompt that is too long. An answer
without a type, with its reasoning, comes last.
"""

import json

import instructor
from instructor.core import InstructorRetryException
from openai import OpenAI
from pydantic import BaseModel
from session import BASE_URL, IDLE_S, KEY, MODEL, RECALL, TOO_LONG


class Boat(BaseModel):
    """A boat in a harbour."""

    name: str
    lights: int
    note: str | None = None


client = OpenAI(base_url=f"{BASE_URL}/v1", api_key=KEY, timeout=IDLE_S, max_retries=0)
common = {"model": MODEL, "response_model": Boat, "max_retries": 0}
LONG = "The tide comes in, and the boats rise. " * 65
BOATS = [Boat(name="Tern", lights=2), Boat(name="Gull", lights=1, note=LONG)]


def request(mode: instructor.Mode, tool: str, boat: Boat) -> dict[str, str]:
    verb = f"call {tool}" if mode is instructor.Mode.TOOLS else "say"
    return {"role": "user", "content": f"[[{verb} {json.dumps(boat.model_dump())}]]"}


for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON):
    chats = instructor.from_openai(client, mode=mode).chat.completions
    messages: list = [{"role": "system", "content": "You are brief."}]
    for boat in BOATS:
        messages.append(request(mode, "PartialBoat", boat))
        parts = list(chats.create_partial(messages=messages, **common))
        assert parts[-1].model_dump() == boat.model_dump(), parts[-1]
        messages.append({"role": "assistant", "content": boat.model_dump_json()})
    notes = {part.note for part in parts}
    assert len(notes) > 100, len(notes)  # the long one was streamed
    too_long = [*messages, {"role": "user", "content": TOO_LONG}]
    try:
        list(chats.create_partial(messages=too_long, **common))
    except InstructorRetryException as error:
        refusal = str(error)
    else:
        raise AssertionError("the prompt was taken")
    assert "maximum context length" in refusal, refusal
    messages.append(request(mode, "Boat", BOATS[0]))
    boat = chats.create(messages=messages, **common)
    assert boat.model_dump() == BOATS[0].model_dump(), boat
    # The grammar of a typed answer does not allow reasoning.
    messages.append({"role": "user", "content": RECALL})
    recalled = chats.create(messages=messages, **common | {"response_model": None})
    answer = recalled.choices[0].message
    assert "turn 4" in answer.content, answer
    assert "I look at what was said" in answer.reasoning_content, answer
    print(mode, "ok", flush=True)
