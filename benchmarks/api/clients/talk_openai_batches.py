"""openai: files, and batches of chats and responses over them, with tools and a schema."""

import json
import time

from conversation import BASE_URL, CITY, KEY, MODEL, QUESTION, WEATHER, checked, is_weather
from openai import OpenAI

client = OpenAI(base_url=f"{BASE_URL}/v1", api_key=KEY)
LIMIT_S = 120.0
ENDED = ("completed", "failed", "expired", "cancelled")
MESSAGES = [{"role": "user", "content": QUESTION}]
FUNCTION = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}


def line(key: str, url: str, **body: object) -> str:
    body = {"model": MODEL, **body}
    return json.dumps({"custom_id": key, "method": "POST", "url": url, "body": body}) + "\n"


def outputs(url: str, text: str) -> dict[str, dict]:
    """The bodies of a batch's answers by the keys of their lines; deletes the input file."""
    file = client.files.create(file=("batch.jsonl", text.encode()), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint=url, completion_window="24h", metadata={"by": "a script"}
    )
    until = time.monotonic() + LIMIT_S
    while batch.status not in ENDED and time.monotonic() < until:
        time.sleep(0.2)
        batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed", batch
    assert batch.id in [one.id for one in client.batches.list()]
    assert batch.request_counts.total == len(text.splitlines())
    lines = client.files.content(batch.output_file_id).text.splitlines()
    assert client.files.delete(file.id).deleted
    found = map(json.loads, lines)
    return {one["custom_id"]: one["response"]["body"] for one in found}


def chats() -> bool:
    url = "/v1/chat/completions"
    found = outputs(
        url,
        line("text", url, messages=MESSAGES, max_tokens=20)
        + line("schema", url, messages=MESSAGES, max_tokens=400, response_format=SCHEMA)
        + line(
            "tool",
            url,
            messages=MESSAGES,
            max_tokens=400,
            tools=[FUNCTION],
            tool_choice="required",
        ),
    )
    messages = {key: body["choices"][0]["message"] for key, body in found.items()}
    call = messages["tool"]["tool_calls"][0]["function"]
    return (
        bool(messages["text"]["content"])
        and set(json.loads(messages["schema"]["content"])) == {"name", "inhabitants"}
        and is_weather(json.loads(call["arguments"]))
    )


def responses() -> bool:
    url = "/v1/responses"
    found = outputs(url, line("one", url, input=QUESTION, max_output_tokens=20))
    return found["one"]["output"][0]["type"] == "message"


def errors() -> bool:
    """A refused line is in the error file."""
    url = "/v1/chat/completions"
    text = line("bad", url, messages=MESSAGES, temperature=9)
    file = client.files.create(file=("batch.jsonl", text.encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")
    until = time.monotonic() + LIMIT_S
    while batch.status not in ENDED and time.monotonic() < until:
        time.sleep(0.2)
        batch = client.batches.retrieve(batch.id)
    error = json.loads(client.files.content(batch.error_file_id).text)
    return error["custom_id"] == "bad" and error["response"]["status_code"] == 400


checked(chats, responses, errors)
