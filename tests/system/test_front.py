"""HTTP, gRPC and the Python API give one request the same answer, or refuse it with the same error.

Tiny seeded models, served and in this process.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from builders.tiny_models import write_tiny
from fakes.tool_model import TEMPLATE, THINKING
from systems.fleet import Fleet

from pdserve import (
    LLM,
    ContextLengthExceeded,
    InvalidRequest,
    Logprob,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from pdserve.protos import common_pb2, text_pb2, text_pb2_grpc
from pdserve.services.common.errors import ServiceError

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
ABC: dict[str, Any] = {**SAMPLED, "max_tokens": 60, "allowed_token_ids": [64, 65, 66]}
LONG: dict[str, Any] = {**GREEDY, "max_tokens": 40}


@dataclass(frozen=True)
class Case:
    """A request, by the Python API's names. `options`: of a chat. `grpc`: it is sent by gRPC, too.
    `effect`: parameters without which the answer differs."""

    prompt: Any = "hello"
    params: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    grpc: bool = False
    effect: Sequence[str] = ()

    @property
    def is_chat(self) -> bool:
        return isinstance(self.prompt, list) and all(isinstance(one, dict) for one in self.prompt)


Scores = Sequence[Mapping[int, float] | None] | None
"""Log-probabilities by token id, for each position; None: not requested, or a first token."""


@dataclass(frozen=True)
class Answer:
    """One choice. gRPC has only the text and the finish."""

    text: str
    finish: str
    ids: Sequence[int] = ()
    reasoning: str = ""
    calls: Sequence[tuple[str, str]] = ()
    scores: Scores = None
    prompt_scores: Scores = None


@dataclass(frozen=True)
class Refusal:
    text: str
    param: str
    is_about_context: bool


ANSWERED: dict[str, Case] = {
    "greedy": Case("hello", GREEDY, grpc=True),
    "sampled": Case("hello", SAMPLED, grpc=True),
    "token ids": Case([72, 101, 108], GREEDY),
    "empty text": Case("", GREEDY, grpc=True),
    "chat": Case(HI, GREEDY, grpc=True),
    "sampled chat": Case(HI, {**SAMPLED, "top_k": 40, "top_p": 0.9, "min_p": 0.01}, grpc=True),
    "choices": Case("hello", {**SAMPLED, "n": 3}, grpc=True),
    "no top_p": Case("hello", {**SAMPLED, "top_p": 0.0}, grpc=True, effect=["top_p"]),
    "all of top_k": Case("hello", {**SAMPLED, "top_k": -1}),
    "repetition": Case(
        "hello", {**LONG, "repetition_penalty": 10.0}, grpc=True, effect=["repetition_penalty"]
    ),
    "presence": Case(
        "hello", {**LONG, "presence_penalty": 2.0}, grpc=True, effect=["presence_penalty"]
    ),
    "frequency": Case(
        "hello", {**ABC, "frequency_penalty": -2.0}, grpc=True, effect=["frequency_penalty"]
    ),
    "penalty window": Case(
        "hello",
        {**LONG, "presence_penalty": 2.0, "penalty_window": 2},
        grpc=True,
        effect=["penalty_window"],
    ),
    "stop strings": Case("hello", {**ABC, "stop": ["aa", "bc"]}, grpc=True, effect=["stop"]),
    "stop string kept": Case(
        "hello",
        {**ABC, "stop": ["aa", "bc"], "include_stop_str_in_output": True},
        effect=["stop", "include_stop_str_in_output"],
    ),
    "empty stop string": Case("hello", {**SAMPLED, "stop": [""]}, grpc=True),
    "stop ids": Case(
        "hello", {**ABC, "stop_token_ids": [65]}, grpc=True, effect=["stop_token_ids"]
    ),
    "min_tokens": Case(
        "hello",
        {**ABC, "min_tokens": 40, "stop_token_ids": [65]},
        grpc=True,
        effect=["min_tokens", "stop_token_ids"],
    ),
    "logit_bias": Case(
        "hello",
        {**SAMPLED, "logit_bias": {97: 90.0, 98: 90.0}},
        grpc=True,
        effect=["logit_bias"],
    ),
    "allowed ids": Case("hello", ABC, grpc=True, effect=["allowed_token_ids"]),
    "bad words": Case("hello", {**ABC, "bad_words": ["ab", "c"]}, effect=["bad_words"]),
    "special tokens": Case(
        "hello",
        {**GREEDY, "logit_bias": {257: 100.0}, "skip_special_tokens": False},
        effect=["skip_special_tokens"],
    ),
    "logprobs": Case("hello", {**GREEDY, "logprobs": 2, "logprob_token_ids": [5]}),
    "only the chosen": Case("hello", {**SAMPLED, "logprobs": 0, "n": 2}),
    "logprobs of a chat": Case(HI, {**GREEDY, "logprobs": 3}),
    "prompt_logprobs": Case("hello", {**GREEDY, "prompt_logprobs": 1}),
    "more than the context": Case("hello " * 80, {**GREEDY, "max_tokens": 100_000}, grpc=True),
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
THOUGHTFUL: dict[str, Case] = {
    "thinking": Case(HI, LONG),
    "thinking budget": Case(
        HI, {**LONG, "thinking_token_budget": 4}, effect=["thinking_token_budget"]
    ),
}
REFUSED: dict[str, tuple[Case, str]] = {
    "a long stop": (
        Case(params={"stop": ["a" * 257]}, grpc=True),
        "a stop string must have 1 to 256",
    ),
    "many stops": (
        Case(params={"stop": ["a"] * 17}, grpc=True),
        "stop: at most 16 entries, not 17",
    ),
    "hot": (
        Case(params={"temperature": 2.5}, grpc=True),
        "temperature must be from 0 to 2, not 2.5",
    ),
    "cold": (
        Case(HI, {"temperature": -1.0}, grpc=True),
        "temperature must be from 0 to 2, not -1.0",
    ),
    "top_p": (Case(params={"top_p": 1.5}, grpc=True), "top_p must be from 0 to 1, not 1.5"),
    "top_k": (Case(params={"top_k": -2}), "top_k must be from -1 to"),
    "min_p": (Case(params={"min_p": -0.5}, grpc=True), "min_p must be from 0 to 1, not -0.5"),
    "no penalty": (
        Case(params={"repetition_penalty": 0.0}, grpc=True),
        "repetition_penalty must be from",
    ),
    "presence": (
        Case(params={"presence_penalty": 3.0}, grpc=True),
        "presence_penalty must be from -2 to 2",
    ),
    "frequency": (
        Case(HI, {"frequency_penalty": -3.0}, grpc=True),
        "frequency_penalty must be from -2",
    ),
    "n": (Case(params={"n": 129}, grpc=True), "n must be from 1 to 128, not 129"),
    "a batch of choices": (Case(params={**GREEDY, "n": 100}, grpc=True), "n must be at most 64"),
    "max_tokens": (Case(params={"max_tokens": -5}), "max_tokens must be at least 1, not -5"),
    "min_tokens": (
        Case(params={"min_tokens": 5000}, grpc=True),
        "min_tokens must be from 0 to 512",
    ),
    "min above max": (
        Case(params={"min_tokens": 9, "max_tokens": 8}, grpc=True),
        "at most max_tokens (8)",
    ),
    "min above room": (Case("x" * 500, {"min_tokens": 20}, grpc=True), "at most max_tokens ("),
    "logprobs": (Case(params={"logprobs": 21}), "logprobs must be from 0 to 20, not 21"),
    "prompt_logprobs": (Case(params={"prompt_logprobs": 21}), "prompt_logprobs must be from 0"),
    "ids without logprobs": (Case(params={"logprob_token_ids": [1]}), "requires logprobs"),
    "a stop id": (
        Case(params={"stop_token_ids": [9999]}, grpc=True),
        "must have token ids from 0 to",
    ),
    "many stop ids": (
        Case(params={"stop_token_ids": [1] * 129}, grpc=True),
        "at most 128 entries, not 129",
    ),
    "an allowed id": (Case(params={"allowed_token_ids": [5, 9999]}, grpc=True), "not 9999"),
    "a biased id": (
        Case(params={"logit_bias": {9999: 1.0}}, grpc=True),
        "must have token ids from 0 to",
    ),
    "a bias": (
        Case(params={"logit_bias": {5: 101.0}}, grpc=True),
        "a bias must be from -100 to 100",
    ),
    "spaces": (Case(params={"bad_words": ["  "]}), "a bad word must have 1 to 256 characters"),
    "a long word": (Case(params={"bad_words": ["a" * 257]}), "a bad word must have 1 to 256"),
    "many words": (Case(params={"bad_words": ["a"] * 129}), "at most 128 entries, not 129"),
    "seed": (Case(params={"seed": 2**63}, grpc=True), "seed must be from"),
    "thinking": (Case(HI, {"thinking_token_budget": 4}), "reasoning of this model is not parsed"),
    "regex": (Case(params={"structured_outputs": {"regex": "("}}), "invalid regular expression"),
    "grammar": (Case(params={"structured_outputs": {"grammar": "start: x"}}), "grammar"),
    "schema": (Case(HI, {"structured_outputs": {"json": {"contains": {}}}}), "contains"),
    "structure and min_tokens": (
        Case(params={"structured_outputs": {"regex": "a"}, "min_tokens": 2}),
        "min_tokens cannot be combined with structured_outputs.regex",
    ),
    "an unknown id": (Case([72, 9999]), "token id 9999 is outside the vocabulary"),
    "a long prompt": (
        Case("x" * 600, {"max_tokens": 4}, grpc=True),
        "maximum context length is 512 tokens",
    ),
    "a long chat": (Case([{"role": "user", "content": "x" * 600}], grpc=True), "in the messages"),
    "a role": (Case([{"role": "wizard", "content": "hi"}], grpc=True), "unknown role 'wizard'"),
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
    """The three ways to one model; each returns the choices of an answer, or its refusal."""

    def __init__(self, fleet: Fleet, llm: LLM) -> None:
        self._http = httpx.Client(base_url=fleet.url, timeout=60)
        self._channel = grpc.insecure_channel(fleet.grpc)
        self._text: Any = text_pb2_grpc.TextStub(self._channel)
        self._llm = llm

    def close(self) -> None:
        self._http.close()
        self._channel.close()

    def of_http(self, case: Case) -> list[Answer] | Refusal:
        body = {"model": "tiny", "return_token_ids": True, **case.params, **case.options}
        body["return_tokens_as_token_ids"] = True
        if "logit_bias" in body:
            body["logit_bias"] = {str(token): bias for token, bias in body["logit_bias"].items()}
        if "penalty_window" in body:
            body["repeat_last_n"] = body.pop("penalty_window")
        if case.is_chat and "logprobs" in body:
            body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
        path = "/v1/chat/completions" if case.is_chat else "/v1/completions"
        body["messages" if case.is_chat else "prompt"] = case.prompt
        reply = self._http.post(path, json=body)
        if reply.status_code != 200:
            assert reply.status_code == 400, reply.text
            error = reply.json()["error"]
            assert error["code"] in (None, "context_length_exceeded")
            text = error["message"].removesuffix(" (context_length_exceeded)")
            return Refusal(text, error["param"], error["code"] is not None)
        whole = reply.json()
        answers = []
        for choice in whole["choices"]:
            message = choice.get("message", {})
            calls = [call["function"] for call in message.get("tool_calls") or ()]
            answer = Answer(
                choice["text"] if "text" in choice else message["content"] or "",
                choice["finish_reason"],
                choice["token_ids"],
                message.get("reasoning_content") or "",
                [(call["name"], call["arguments"]) for call in calls],
                http_scores(choice["logprobs"]),
                http_prompt_scores(choice.get("prompt_logprobs")),
            )
            answers.append(answer)
        return answers

    def of_grpc(self, case: Case) -> list[Answer] | Refusal:
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
        except grpc.RpcError as rpc_error:
            error = ServiceError.from_rpc(rpc_error)
            assert error.code in (common_pb2.INVALID_ARGUMENT, common_pb2.CONTEXT_LENGTH_EXCEEDED)
            exceeds = error.code == common_pb2.CONTEXT_LENGTH_EXCEEDED
            return Refusal(error.message, error.param, exceeds)
        return [Answer(text, finish) for text, finish in zip(texts, finishes, strict=True)]

    def of_python(self, case: Case) -> list[Answer] | Refusal:
        try:
            output = self._output(case)
        except (InvalidRequest, ContextLengthExceeded) as error:
            return Refusal(str(error), error.param, isinstance(error, ContextLengthExceeded))
        return [
            Answer(
                one.text,
                one.finish_reason,
                list(one.token_ids),
                one.reasoning,
                [(call.name, call.arguments) for call in one.tool_calls],
                python_scores(one.logprobs),
                python_scores(output.prompt_logprobs),
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


def python_scores(logprobs: Sequence[Mapping[int, Logprob] | None] | None) -> Scores:
    if logprobs is None:
        return None
    return [
        None if one is None else {token: entry.logprob for token, entry in one.items()}
        for one in logprobs
    ]


def http_scores(logprobs: dict[str, Any] | None) -> Scores:
    """Read the `logprobs` of a chat or a completion, whose tokens are named by their ids."""
    if logprobs is None:
        return None
    if "content" in logprobs:
        positions = [
            {entry["token"]: entry["logprob"] for entry in (token, *token["top_logprobs"])}
            for token in logprobs["content"]
        ]
    else:
        chosen = zip(logprobs["tokens"], logprobs["token_logprobs"], strict=True)
        positions = [
            {**top, token: score}
            for top, (token, score) in zip(logprobs["top_logprobs"], chosen, strict=True)
        ]
    return [
        {int(name.removeprefix("token_id:")): score for name, score in one.items()}
        for one in positions
    ]


def http_prompt_scores(logprobs: Sequence[dict[str, Any] | None] | None) -> Scores:
    if logprobs is None:
        return None
    return [
        None if one is None else {int(token): entry["logprob"] for token, entry in one.items()}
        for one in logprobs
    ]


def about(scores: Scores) -> Any:
    """Return a value that equals these log-probabilities within rounding errors."""
    if scores is None:
        return None
    return [None if one is None else pytest.approx(one, abs=1e-4) for one in scores]


@contextmanager
def fronts_of(folder: Path, template: str) -> Iterator[Fronts]:
    model = write_tiny(folder / "tiny", "llama")
    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    served = ("--kv-tokens", "8192", "--block-size", "32", "--weights", "float32")
    with (
        Fleet("--model", str(model), "--prefill", "0", *served) as fleet,
        LLM(str(model), kv_tokens=8192, block_size=32, weights="float32") as llm,
    ):
        made = Fronts(fleet, llm)
        yield made
        made.close()


@pytest.fixture(scope="module")
def fronts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fronts]:
    with fronts_of(tmp_path_factory.mktemp("models"), TEMPLATE) as made:
        yield made


def assert_same_answers(fronts: Fronts, cases: Mapping[str, Case], tests: pytest.Subtests) -> None:
    for name, case in cases.items():
        with tests.test(name):
            answers = fronts.of_python(case)
            assert isinstance(answers, list), answers
            expected = [
                replace(one, scores=about(one.scores), prompt_scores=about(one.prompt_scores))
                for one in answers
            ]
            assert fronts.of_http(case) == expected
            if case.grpc:
                assert fronts.of_grpc(case) == [Answer(one.text, one.finish) for one in answers]
            for param in case.effect:
                params = {key: value for key, value in case.params.items() if key != param}
                assert fronts.of_python(replace(case, params=params)) != answers, param


def test_answers_are_the_same(fronts: Fronts, subtests: pytest.Subtests) -> None:
    assert_same_answers(fronts, ANSWERED, subtests)


@pytest.mark.extended
def test_answers_of_a_thinking_model_are_the_same(
    tmp_path: Path, subtests: pytest.Subtests
) -> None:
    with fronts_of(tmp_path, THINKING.rstrip() + "<think>\n") as fronts:
        assert_same_answers(fronts, THOUGHTFUL, subtests)


def test_refusals_are_the_same(fronts: Fronts, subtests: pytest.Subtests) -> None:
    for name, (case, text) in REFUSED.items():
        with subtests.test(name):
            refusal = fronts.of_python(case)
            assert isinstance(refusal, Refusal), refusal
            assert text in refusal.text
            assert refusal.param
            assert fronts.of_http(case) == refusal
            if case.grpc:
                assert fronts.of_grpc(case) == refusal
