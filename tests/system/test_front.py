"""HTTP, gRPC and the Python API give one request the same answer, or refuse it with the same text.

One tiny seeded model, served and in this process.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx
import pytest
from builders.tiny_models import write_tiny
from fakes.tool_model import TEMPLATE
from systems.fleet import Fleet

from pdserve import (
    LLM,
    ContextLengthExceeded,
    InvalidRequest,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from pdserve.protos import common_pb2, text_pb2, text_pb2_grpc

HI = [{"role": "user", "content": "hi"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_time",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"enum": ["a", "b"]}},
            "required": ["zone"],
            "additionalProperties": False,
        },
    },
}
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "max_tokens": 8, "ignore_eos": True, "seed": 7}
# Of a request for text in gRPC's Text service.
WIRE = {item.name for item in common_pb2.SamplingParams.DESCRIPTOR.fields}
WIRE -= {"logprobs", "prompt_logprobs", "logprob_token_ids", "bad_words", "grammar", "thinking"}
WIRE |= {"stop", "seed"}


@dataclass(frozen=True)
class Case:
    """A request, by the Python API's names; `options`: of a chat."""

    prompt: Any = "hello"
    params: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def is_chat(self) -> bool:
        return isinstance(self.prompt, list) and all(isinstance(one, dict) for one in self.prompt)

    @property
    def has_grpc_form(self) -> bool:
        negative = any(isinstance(value, int) and value < 0 for value in self.params.values())
        ids = not self.is_chat and not isinstance(self.prompt, str)
        return not (self.options or negative or ids or self.params.keys() - WIRE)


Answer = list[tuple[str, str, list[int] | None, list[tuple[str, str]]]]
"""Text, finish, token ids and tool calls of each choice; gRPC has neither ids nor calls."""

ANSWERED: dict[str, Case] = {
    "greedy": Case("hello", GREEDY),
    "sampled": Case("hello", SAMPLED),
    "token ids": Case([72, 101, 108], GREEDY),
    "empty text": Case("", GREEDY),
    "chat": Case(HI, GREEDY),
    "sampled chat": Case(HI, {**SAMPLED, "top_k": 40, "top_p": 0.9, "min_p": 0.01}),
    "choices": Case("hello", {**SAMPLED, "n": 3}),
    "no top_p": Case("hello", {**SAMPLED, "top_p": 0.0}),
    "all of top_k": Case("hello", {**SAMPLED, "top_k": -1}),
    "penalties": Case(
        "hello",
        {
            **SAMPLED,
            "repetition_penalty": 1.5,
            "presence_penalty": 1.0,
            "frequency_penalty": -1.0,
        },
    ),
    "stop strings": Case("hello", {**SAMPLED, "max_tokens": 60, "stop": ["*", "K"]}),
    "stop string kept": Case(
        "hello",
        {**SAMPLED, "max_tokens": 60, "stop": ["*", "K"], "include_stop_str_in_output": True},
    ),
    "stop ids": Case("hello", {**SAMPLED, "max_tokens": 60, "stop_token_ids": [*range(97, 123)]}),
    "min_tokens": Case(
        "hello",
        {**SAMPLED, "max_tokens": 60, "min_tokens": 5, "stop_token_ids": [*range(97, 123)]},
    ),
    "logit_bias": Case("hello", {**SAMPLED, "logit_bias": {97: 90.0, 98: 90.0}}),
    "allowed ids": Case("hello", {**SAMPLED, "allowed_token_ids": [64, 65, 66]}),
    "bad words": Case(
        "hello", {**SAMPLED, "allowed_token_ids": [64, 65, 66], "bad_words": ["ab", "c"]}
    ),
    "logprobs": Case("hello", {**GREEDY, "logprobs": 2, "logprob_token_ids": [5]}),
    "prompt_logprobs": Case("hello", {**GREEDY, "prompt_logprobs": 1}),
    "more than the context": Case("hello", {**GREEDY, "max_tokens": 100_000}),
    "regex": Case("hello", {"seed": 3, "structured_outputs": {"regex": "[a-d]{5}"}}),
    "choice": Case(HI, {"seed": 3, "structured_outputs": {"choice": ["ab", "cd"]}}),
    "schema": Case(HI, {"seed": 3, "structured_outputs": {"json": {"enum": [1, 2]}}}),
    "continued": Case(
        [*HI, {"role": "assistant", "content": "so"}], GREEDY, {"continue_final_message": True}
    ),
    "tools": Case(HI, GREEDY, {"tools": [TOOL], "tool_choice": "none"}),
    "a call": Case(
        HI,
        {"seed": 3, "max_tokens": 100},
        {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    ),
}
REFUSED: dict[str, tuple[Case, str]] = {
    "a long stop": (Case(params={"stop": ["a" * 257]}), "a stop string must have 1 to 256"),
    "many stops": (Case(params={"stop": ["a"] * 17}), "stop: at most 16 entries, not 17"),
    "hot": (Case(params={"temperature": 2.5}), "temperature must be from 0 to 2, not 2.5"),
    "cold": (Case(HI, {"temperature": -1.0}), "temperature must be from 0 to 2, not -1.0"),
    "top_p": (Case(params={"top_p": 1.5}), "top_p must be from 0 to 1, not 1.5"),
    "top_k": (Case(params={"top_k": -2}), "top_k must be from -1 to"),
    "min_p": (Case(params={"min_p": -0.5}), "min_p must be from 0 to 1, not -0.5"),
    "no penalty": (Case(params={"repetition_penalty": 0.0}), "repetition_penalty must be from"),
    "presence": (Case(params={"presence_penalty": 3.0}), "presence_penalty must be from -2 to 2"),
    "frequency": (Case(HI, {"frequency_penalty": -3.0}), "frequency_penalty must be from -2"),
    "n": (Case(params={"n": 129}), "n must be from 1 to 128, not 129"),
    "a batch of choices": (Case(params={**GREEDY, "n": 100}), "n must be at most 64"),
    "max_tokens": (Case(params={"max_tokens": -5}), "max_tokens must be at least 1, not -5"),
    "min_tokens": (Case(params={"min_tokens": 5000}), "min_tokens must be from 0 to 512"),
    "min above max": (Case(params={"min_tokens": 9, "max_tokens": 8}), "at most max_tokens (8)"),
    "min above room": (Case("x" * 500, {"min_tokens": 20}), "at most max_tokens ("),
    "logprobs": (Case(params={"logprobs": 21}), "logprobs must be from 0 to 20, not 21"),
    "prompt_logprobs": (Case(params={"prompt_logprobs": 21}), "prompt_logprobs must be from 0"),
    "ids without logprobs": (Case(params={"logprob_token_ids": [1]}), "requires logprobs"),
    "a stop id": (Case(params={"stop_token_ids": [9999]}), "must have token ids from 0 to"),
    "many stop ids": (Case(params={"stop_token_ids": [1] * 129}), "at most 128 entries, not 129"),
    "an allowed id": (Case(params={"allowed_token_ids": [5, 9999]}), "not 9999"),
    "a biased id": (Case(params={"logit_bias": {9999: 1.0}}), "must have token ids from 0 to"),
    "a bias": (Case(params={"logit_bias": {5: 101.0}}), "a bias must be from -100 to 100"),
    "spaces": (Case(params={"bad_words": ["  "]}), "a bad word must have 1 to 256 characters"),
    "a long word": (Case(params={"bad_words": ["a" * 257]}), "a bad word must have 1 to 256"),
    "many words": (Case(params={"bad_words": ["a"] * 129}), "at most 128 entries, not 129"),
    "seed": (Case(params={"seed": 2**63}), "seed must be from"),
    "thinking": (Case(HI, {"thinking_token_budget": 4}), "reasoning of this model is not parsed"),
    "regex": (Case(params={"structured_outputs": {"regex": "("}}), "invalid regular expression"),
    "grammar": (Case(params={"structured_outputs": {"grammar": "start: x"}}), "grammar"),
    "schema": (Case(HI, {"structured_outputs": {"json": {"contains": {}}}}), "contains"),
    "structure and min_tokens": (
        Case(params={"structured_outputs": {"regex": "a"}, "min_tokens": 2}),
        "min_tokens cannot be combined with structured_outputs.regex",
    ),
    "an unknown id": (Case([72, 9999]), "token id 9999 is outside the vocabulary"),
    "a long prompt": (Case("x" * 600, {"max_tokens": 4}), "maximum context length is 512 tokens"),
    "a long chat": (Case([{"role": "user", "content": "x" * 600}]), "in the messages"),
    "a role": (Case([{"role": "wizard", "content": "hi"}]), "unknown role 'wizard'"),
    "continued": (
        Case(HI, {}, {"continue_final_message": True, "add_generation_prompt": False}),
        "continue_final_message requires a last assistant message",
    ),
    "tool choice": (
        Case(HI, {}, {"tools": [TOOL], "tool_choice": "always"}),
        "tool_choice must be none, auto, required, or an object with a type",
    ),
    "no tools": (Case(HI, {}, {"tool_choice": "required"}), "tool_choice needs tools"),
    "an unknown tool": (
        Case(
            HI,
            {},
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        ),
        "tool_choice: no tool has the name 'f'",
    ),
    "two tools": (Case(HI, {}, {"tools": [TOOL, TOOL]}), "two tools have the name 'get_time'"),
    "two forms": (
        Case(
            HI,
            {"structured_outputs": {"regex": "a"}},
            {"tools": [TOOL], "tool_choice": "required"},
        ),
        "the form that tool_choice requires",
    ),
}


class Fronts:
    """The three ways to one model; each returns an answer, or the text of the error."""

    def __init__(self, fleet: Fleet, llm: LLM) -> None:
        self._http = httpx.Client(base_url=fleet.url, timeout=60)
        self._channel = grpc.insecure_channel(fleet.grpc)
        self._text: Any = text_pb2_grpc.TextStub(self._channel)
        self._llm = llm

    def close(self) -> None:
        self._http.close()
        self._channel.close()

    def of_http(self, case: Case) -> Answer | str:
        body = {"model": "tiny", "return_token_ids": True, **case.params, **case.options}
        if "logit_bias" in body:
            body["logit_bias"] = {str(token): bias for token, bias in body["logit_bias"].items()}
        path = "/v1/chat/completions" if case.is_chat else "/v1/completions"
        body["messages" if case.is_chat else "prompt"] = case.prompt
        reply = self._http.post(path, json=body)
        if reply.status_code != 200:
            assert reply.status_code == 400, reply.text
            refusal = str(reply.json()["error"]["message"])
            return refusal.removesuffix(" (context_length_exceeded)")  # for clients that read it
        answer: Answer = []
        for choice in reply.json()["choices"]:
            message = choice.get("message", {})
            calls = [call["function"] for call in message.get("tool_calls") or ()]
            text = choice["text"] if "text" in choice else message["content"] or ""
            names = [(call["name"], call["arguments"]) for call in calls]
            answer.append((text, choice["finish_reason"], choice["token_ids"], names))
        return answer

    def of_grpc(self, case: Case) -> Answer | str:
        params = {k: v for k, v in case.params.items() if k not in ("stop", "seed")}
        options = text_pb2.TextOptions(
            params=common_pb2.SamplingParams(**params),
            stop=case.params.get("stop", ()),
            seed=case.params.get("seed"),
        )
        if case.is_chat:
            chat = text_pb2.ChatRequest(model="tiny", messages=case.prompt, options=options)
            chunks = self._text.Chat(chat, timeout=60)
        else:
            text = text_pb2.CompleteRequest(model="tiny", prompt=case.prompt, options=options)
            chunks = self._text.Complete(text, timeout=60)
        texts = [""] * case.params.get("n", 1)
        finishes = [""] * len(texts)
        try:
            for chunk in chunks:
                if not chunk.HasField("usage"):
                    texts[chunk.choice] += chunk.text
                    finishes[chunk.choice] = chunk.finish_reason
        except grpc.RpcError as error:
            return str(error.details())  # type: ignore[attr-defined]
        return [(text, finish, None, []) for text, finish in zip(texts, finishes, strict=True)]

    def of_python(self, case: Case) -> Answer | str:
        try:
            output = self._output(case)
        except (InvalidRequest, ContextLengthExceeded) as error:
            return str(error)
        return [
            (
                one.text,
                one.finish_reason,
                list(one.token_ids),
                [(call.name, call.arguments) for call in one.tool_calls],
            )
            for one in output.outputs
        ]

    def _output(self, case: Case) -> RequestOutput:
        structure = case.params.get("structured_outputs")
        form = {"structured_outputs": StructuredOutputsParams(**structure)} if structure else {}
        params = SamplingParams(**{**case.params, **form})
        if case.is_chat:
            return self._llm.chat(case.prompt, params, **case.options)
        return self._llm.generate(case.prompt, params)[0]


@pytest.fixture(scope="module")
def fronts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fronts]:
    model = write_tiny(tmp_path_factory.mktemp("models") / "tiny", "llama")
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": TEMPLATE}))
    served = ("--kv-tokens", "8192", "--block-size", "32", "--weights", "float32")
    with (
        Fleet("--model", str(model), "--prefill", "0", *served) as fleet,
        LLM(str(model), kv_tokens=8192, block_size=32, weights="float32") as llm,
    ):
        made = Fronts(fleet, llm)
        yield made
        made.close()


def test_answers_are_the_same(fronts: Fronts, subtests: pytest.Subtests) -> None:
    for name, case in ANSWERED.items():
        with subtests.test(name):
            answer = fronts.of_python(case)
            assert isinstance(answer, list), answer
            assert fronts.of_http(case) == answer
            if case.has_grpc_form:
                texts = [(text, finish, None, []) for text, finish, *_ in answer]
                assert fronts.of_grpc(case) == texts


def test_refusals_are_the_same(fronts: Fronts, subtests: pytest.Subtests) -> None:
    for name, (case, text) in REFUSED.items():
        with subtests.test(name):
            refusal = fronts.of_python(case)
            assert text in refusal
            assert fronts.of_http(case) == refusal
            if case.has_grpc_form:
                assert fronts.of_grpc(case) == refusal


def test_each_front_has_many_cases() -> None:
    """Checks that the filter for gRPC leaves enough of both kinds."""
    assert len(ANSWERED) >= 20
    assert len(REFUSED) >= 20
    assert sum(case.has_grpc_form for case in ANSWERED.values()) >= 10
    assert sum(case.has_grpc_form for case, _ in REFUSED.values()) >= 15
