"""The openai and anthropic clients and both gRPC services against a real system with an API key:
local and remote prompts, tools, schemas and responses. The shipped model's chat template does not
support tools. More tests are in tests/clients."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import grpc
import httpx
import openai
import pytest
from pydantic import BaseModel, Field
from systems.eventually import wait_until
from systems.fleet import Fleet
from systems.whole import KEY

MODEL = "SmolLM2-135M-Instruct"
LONG = "The quick brown fox jumps over the lazy dog. " * 60
QUESTION: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {"name": "get_weather", "description": "The weather in a city"}
TOOLS: Any = [{"type": "function", "function": {**TOOL, "parameters": PARAMETERS}}]
SAYS_A_CALL = (
    'Repeat after me.\n<tool_call>\n{"name": "get_weather", "arguments": %s}\n</tool_call>'
)


class Weather(BaseModel):
    """The weather in a city."""

    city: str = Field(max_length=20)
    unit: Literal["celsius", "fahrenheit"]


@pytest.fixture(scope="module", autouse=True)
def rings() -> None:
    """Override the autouse fixture: `fleet` checks its rings itself."""


@pytest.fixture(scope="module")
def claude(fleet: Fleet) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=fleet.url, api_key=KEY, max_retries=0) as client:
        yield client


def test_openai_calls_a_tool_and_returns_its_result(api: openai.OpenAI) -> None:
    with api.chat.completions.stream(
        model=MODEL, messages=QUESTION, tools=TOOLS, tool_choice="required", max_tokens=200, seed=1
    ) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls
    assert not message.content
    for call in message.tool_calls:
        Weather.model_validate_json(call.function.arguments)
    results: Any = [
        {"role": "tool", "tool_call_id": call.id, "content": "18 degrees"}
        for call in message.tool_calls
    ]
    messages: Any = [*QUESTION, message.model_dump(exclude_none=True), *results]
    answer = api.chat.completions.create(
        model=MODEL, messages=messages, tools=TOOLS, tool_choice="none", max_tokens=20
    )
    assert answer.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_the_model_calls_a_tool_without_being_forced(api: openai.OpenAI, stream: bool) -> None:
    """The model is small, so the prompt spells out the call."""
    wanted = {"city": "Paris"}
    messages: Any = [{"role": "user", "content": SAYS_A_CALL % json.dumps(wanted)}]
    found: Any = api.chat.completions.create(
        model=MODEL, messages=messages, tools=TOOLS, temperature=0, max_tokens=60, stream=stream
    )
    if stream:
        deltas = [chunk.choices[0].delta for chunk in found if chunk.choices]
        calls = [call for delta in deltas for call in delta.tool_calls or []]
        text = "".join(call.function.arguments or "" for call in calls if call.index == 0)
    else:
        text = found.choices[0].message.tool_calls[0].function.arguments
    assert json.loads(text) == wanted


def test_openai_parses_an_answer_into_a_pydantic_model(api: openai.OpenAI) -> None:
    answer = api.chat.completions.parse(
        model=MODEL, messages=QUESTION, response_format=Weather, max_tokens=100
    )
    assert isinstance(answer.choices[0].message.parsed, Weather)


def test_responses_with_a_tool_and_a_schema(api: openai.OpenAI) -> None:
    tool: Any = {"type": "function", **TOOL, "parameters": PARAMETERS, "strict": True}
    first = api.responses.create(
        model=MODEL, input=QUESTION, tools=[tool], tool_choice="required", max_output_tokens=200
    )
    calls = [item for item in first.output if item.type == "function_call"]
    assert calls
    results: Any = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"}
        for call in calls
    ]
    second = api.responses.parse(
        model=MODEL,
        previous_response_id=first.id,
        input=results,
        text_format=Weather,
        max_output_tokens=100,
    )
    assert isinstance(second.output_parsed, Weather)


def test_anthropic_calls_a_tool_and_returns_its_result(claude: anthropic.Anthropic) -> None:
    tools: Any = [{**TOOL, "input_schema": PARAMETERS}]
    with claude.messages.stream(
        model=MODEL,
        max_tokens=200,
        messages=QUESTION,
        tools=tools,
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    ) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        message = stream.get_final_message()
    (use,) = message.content
    assert use.type == "tool_use"
    assert Weather.model_validate_json("".join(pieces)).model_dump() == use.input
    result: Any = {"type": "tool_result", "tool_use_id": use.id, "content": "18 degrees"}
    messages: Any = [
        *QUESTION,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    answer = claude.messages.create(
        model=MODEL, max_tokens=20, messages=messages, tools=tools, tool_choice={"type": "none"}
    )
    assert answer.content[0].type == "text"


@pytest.fixture(scope="module")
def model(api: openai.OpenAI) -> str:
    (found,) = api.models.list().data
    assert api.models.retrieve(found.id).id == found.id
    return found.id


def chat(api: openai.OpenAI, model: str, text: str, **options: Any) -> Any:
    messages: Any = [{"role": "user", "content": text}]
    return api.chat.completions.create(model=model, messages=messages, **options)


def test_a_long_prompt_is_prefilled_remotely_and_a_short_one_locally(
    fleet: Fleet, api: openai.OpenAI, model: str
) -> None:
    """The decode worker caches the long prompt, so a repetition needs no prefill worker."""
    local, remote = fleet.prefills("local"), fleet.prefills("remote")
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
    short = chat(api, model, "Name the capital of France.", **options)
    assert (fleet.prefills("local"), fleet.prefills("remote")) == (local + 1, remote)
    assert "Paris" in short.choices[0].message.content
    long = chat(api, model, LONG, **options)
    assert (fleet.prefills("local"), fleet.prefills("remote")) == (local + 1, remote + 1)
    assert long.usage.prompt_tokens > 512
    assert long.usage.completion_tokens > 0
    again = chat(api, model, LONG, **options)
    assert again.choices[0].message.content == long.choices[0].message.content
    assert again.usage.prompt_tokens_details.cached_tokens > 0
    assert fleet.prefills("local") == local + 2
    wait_until(fleet.all_blocks_back, "blocks back")


def test_a_stream_equals_the_whole_answer(api: openai.OpenAI, model: str) -> None:
    whole = chat(api, model, "Name three rivers.", temperature=0, max_tokens=24)
    chunks = list(
        chat(
            api, model, "Name three rivers.", temperature=0, max_tokens=24,
            stream=True, stream_options={"include_usage": True},
        )
    )  # fmt: skip
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    finishes = {c.choices[0].finish_reason for c in chunks if c.choices} - {None}
    assert finishes == {whole.choices[0].finish_reason}


@pytest.mark.parametrize("prompt", ["A short prompt about rivers", LONG], ids=["local", "remote"])
def test_a_seed_gives_the_same_choices_again(
    fleet: Fleet, api: openai.OpenAI, model: str, prompt: str
) -> None:
    before = fleet.prefills("remote")
    options: dict[str, Any] = {"seed": 7, "n": 3, "temperature": 1.0, "max_tokens": 12}
    first = api.completions.create(model=model, prompt=prompt, **options)
    again = api.completions.create(model=model, prompt=prompt, **options)
    texts = [choice.text for choice in first.choices]
    assert [choice.text for choice in again.choices] == texts
    assert len(set(texts)) > 1
    assert fleet.prefills("remote") - before == (1 if prompt == LONG else 0)
    if prompt == LONG:
        assert again.usage.prompt_tokens_details.cached_tokens > 500


def test_logprobs_and_echo_agree_between_local_and_remote(
    fleet: Fleet, api: openai.OpenAI, model: str
) -> None:
    """Compares a prompt that is prefilled remotely with its cached repetition, which also echoes
    the prompt."""
    prompt = "Agree: " + LONG
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "logprobs": 2}
    before = fleet.prefills("remote")
    remote = api.completions.create(model=model, prompt=prompt, **options).choices[0]
    assert fleet.prefills("remote") == before + 1
    local = api.completions.create(model=model, prompt=prompt, echo=True, **options).choices[0]
    assert fleet.prefills("remote") == before + 1
    assert local.text == prompt + remote.text
    assert local.logprobs.tokens[-6:] == remote.logprobs.tokens
    near = pytest.approx(remote.logprobs.token_logprobs, abs=1e-3)
    assert local.logprobs.token_logprobs[-6:] == near
    assert local.logprobs.token_logprobs[0] is None
    assert all(x < 0 for x in local.logprobs.token_logprobs[1:])


def test_a_stop_string_ends_the_answer_and_decode(
    fleet: Fleet, api: openai.OpenAI, model: str
) -> None:
    prompt = "1, 2, 3, 4, 5, 6, 7,"
    whole = api.completions.create(model=model, prompt=prompt, temperature=0, max_tokens=40)
    stop = whole.choices[0].text[8:12]
    cut = api.completions.create(
        model=model, prompt=prompt, temperature=0, max_tokens=40, stop=[stop]
    )
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].text == whole.choices[0].text.split(stop)[0]
    assert cut.usage.completion_tokens < whole.usage.completion_tokens


def test_bounds_and_names_are_checked(api: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        chat(api, "no-such-model", "x")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        api.completions.create(model=model, prompt=[1] * 9000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as hot:
        chat(api, model, "x", temperature=9)
    assert hot.value.param == "temperature"
    with pytest.raises(openai.AuthenticationError):
        chat(api.with_options(api_key="wrong"), model, "x")


def test_tokenize_and_detokenize(fleet: Fleet, model: str) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=fleet.url, headers=headers) as http:
        ids = http.post("/tokenize", json={"model": model, "prompt": "Hé 🙂"}).json()["tokens"]
        back = http.post("/detokenize", json={"model": model, "tokens": ids}).json()
        assert back["prompt"] == "Hé 🙂"
        assert http.get("/ready").status_code == 200


def test_grpc_text_and_generate(fleet: Fleet, api: openai.OpenAI, model: str) -> None:
    from pdserve.protos import common_pb2, router_pb2, router_pb2_grpc, text_pb2, text_pb2_grpc

    key = [("authorization", f"Bearer {KEY}")]
    params = common_pb2.SamplingParams(temperature=0, max_tokens=8)
    with grpc.insecure_channel(fleet.grpc) as channel:
        stub = text_pb2_grpc.TextStub(channel)
        ask = text_pb2.CompleteRequest(
            prompt="Paris is the capital of", options=text_pb2.TextOptions(params=params)
        )
        text = "".join(chunk.text for chunk in stub.Complete(ask, metadata=key))
        with pytest.raises(grpc.RpcError) as refused:
            next(iter(stub.Complete(ask)))
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED  # type: ignore[attr-defined]
    wanted = api.completions.create(
        model=model, prompt="Paris is the capital of", temperature=0, max_tokens=8
    )
    assert text == wanted.choices[0].text
    with grpc.insecure_channel(fleet.router) as channel:
        stub = router_pb2_grpc.RouterStub(channel)
        generate = router_pb2.GenerateRequest(prompt_ids=[504, 3575, 282], params=params)
        events = list(stub.Generate(generate, metadata=key))
    assert events[-1].WhichOneof("event") == "finished"
    assert sum(len(e.tokens.ids) for e in events) == 8
