"""instructor: typed answers by a tool and by a schema, whole and in parts, in one conversation."""

import instructor
from openai import OpenAI
from pydantic import BaseModel
from session import BASE_URL, IDLE_S, KEY, MODEL


class Boat(BaseModel):
    """A boat in a harbour."""

    name: str
    lights: int
    note: str | None = None


client = OpenAI(base_url=f"{BASE_URL}/v1", api_key=KEY, timeout=IDLE_S, max_retries=0)
FIELDS = '{"name": "Tern", "lights": 2}'

for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON):
    asker = instructor.from_openai(client, mode=mode)
    verb = f"call Boat {FIELDS}" if mode is instructor.Mode.TOOLS else f"say {FIELDS}"
    messages: list = [{"role": "system", "content": "You are brief."}]
    for number in (1, 2, 3):
        messages.append({"role": "user", "content": f"[[{verb}]] ({number})"})
        parts = list(
            asker.chat.completions.create_partial(
                model=MODEL, response_model=Boat, messages=messages, max_retries=0
            )
        )
        assert parts[-1].name == "Tern", parts
        assert parts[-1].lights == 2, parts
        messages.append({"role": "assistant", "content": parts[-1].model_dump_json()})
    boat = asker.chat.completions.create(
        model=MODEL, response_model=Boat, messages=messages[:2], max_retries=0
    )
    assert (boat.name, boat.lights) == ("Tern", 2), boat
    print(mode, "ok", flush=True)
