"""Bodies of clients of other servers: alternative field names, neutral values, and model names."""

from typing import Any

import pytest
from fakes.router import FakeRouter, saying, served, thinking_model
from fakes.tool_model import THINKING as TEMPLATE
from fakes.tool_model import ToolModel
from oracles.http_errors import CHAT, HI, PLAIN, check
from oracles.sse import events

pytestmark = pytest.mark.anyio
CONTEXT_LEN = 300
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "tiny", "messages": HI},
    PLAIN: {"model": "tiny", "prompt": "a"},
}
TOLD = (
    "{{ messages[0].content }}{% if reasoning_effort is defined %} effort {{ reasoning_effort }}"
    "{% endif %}{% if enable_thinking is defined %} thinking {{ enable_thinking }} {{ thinking }}"
    "{% endif %}{# </think> #}"
)
THINKING: list[tuple[dict[str, Any], str]] = [
    ({"enable_thinking": False}, "hi thinking False False"),
    ({"enable_thinking": True}, "hi thinking True True"),
    ({"think": False}, "hi thinking False False"),
    ({"think": True}, "hi thinking True True"),
    ({"think": "high"}, "hi effort high thinking True True"),
    ({"thinking": False}, "hi thinking False False"),
    ({"thinking": True}, "hi thinking True True"),
    ({"thinking": {"type": "disabled"}}, "hi thinking False False"),
    ({"thinking": {"type": "enabled"}}, "hi thinking True True"),
    ({"thinking": {"type": "adaptive"}}, "hi thinking True True"),
    ({"reasoning": {"enabled": False}}, "hi thinking False False"),
    ({"reasoning": {"enabled": True}}, "hi thinking True True"),
    ({"reasoning": {"effort": "low"}}, "hi effort low"),
    ({"reasoning": {"effort": "none"}}, "hi effort none thinking False False"),
    ({"reasoning": {"max_tokens": 9}}, "hi thinking True True"),
    ({"reasoning": {"max_tokens": -1}}, "hi"),
    ({"reasoning": {"enabled": False, "max_tokens": 9}}, "hi thinking False False"),
    ({"reasoning_effort": "none"}, "hi effort none thinking False False"),
    ({"reasoning_effort": "none", "enable_thinking": False}, "hi effort none thinking False False"),
    ({"enable_thinking": None, "think": None, "thinking": None, "reasoning": None}, "hi"),
]


def templated() -> FakeRouter:
    card, blobs = served(template=TOLD)
    return FakeRouter(saying("<think>hm</think>hello"), [card], blobs)


async def test_thinking_by_every_name(make_http, subtests):
    for fields, text in THINKING:
        with subtests.test(fields=fields):
            router = templated()
            reply = await make_http(router).post(CHAT, json={**BODIES[CHAT], **fields})
            assert reply.status_code == 200, reply.text
            (start,) = router.starts
            assert list(start.prompt_ids) == router.encode(text)
            reasoning = fields.get("reasoning") or {}
            budget = 0 if reasoning.get("enabled") is False else reasoning.get("max_tokens", 0)
            assert start.params.thinking.max_tokens == max(budget, 0)
    router = templated()
    client = make_http(router)
    body = {**BODIES[CHAT], "thinking": {"type": "enabled", "budget_tokens": 7}}
    assert (await client.post(CHAT, json=body)).status_code == 200
    assert router.starts[-1].params.thinking.max_tokens == 7
    for wrong in (
        {"enable_thinking": True, "thinking": False},
        {"think": False, "reasoning": {"enabled": True}},
        {"enable_thinking": True, "reasoning_effort": "none"},
        {"think": False, "reasoning_effort": "high"},
        {"enable_thinking": False, "reasoning": {"effort": "low"}},
    ):
        reply = await client.post(CHAT, json=BODIES[CHAT] | wrong)
        assert "contradicts" in check(reply, 400, list(wrong)[1])["message"]


async def test_thinking_in_responses(make_http, subtests):
    router = templated()
    client = make_http(router)
    update = {"type": "configuration_update", "reasoning": {"effort": "high"}}
    items = [{"role": "user", "content": "hi"}, update]
    for fields, text in (
        ({"enable_thinking": False}, "hi thinking False False"),
        ({"enable_thinking": False, "reasoning": {"effort": "none"}},
         "hi effort none thinking False False"),
        ({"reasoning": {"effort": "none"}}, "hi effort none thinking False False"),
        ({"reasoning": {"effort": "none"}, "input": items}, "hi effort high"),
        ({"reasoning": {"enabled": False}}, "hi thinking False False"),
        ({"reasoning": {"enabled": False}, "input": items}, "hi effort high"),
        ({"reasoning": {"max_tokens": 9}}, "hi thinking True True"),
    ):  # fmt: skip
        with subtests.test(fields=fields):
            reply = await client.post("/v1/responses", json={"input": "hi", **fields})
            assert reply.status_code == 200, reply.text
            assert list(router.starts[-1].prompt_ids) == router.encode(text)
            budget = fields.get("reasoning", {}).get("max_tokens", 0)
            assert router.starts[-1].params.thinking.max_tokens == budget
    for path in ("/v1/responses", "/v1/responses/input_tokens"):
        for wrong in (
            {"enable_thinking": False, "reasoning": {"effort": "high"}},
            {"think": True, "reasoning": {"effort": "none"}},
            {"thinking": False, "input": items},
        ):
            reply = await client.post(path, json={"input": "hi", **wrong})
            assert "contradicts" in check(reply, 400, "reasoning")["message"]


async def test_false_is_refused_if_it_cannot_be_honoured(make_http, subtests):
    client = make_http(saying("x"))
    for name, value in (
        ("enable_thinking", False), ("think", False), ("thinking", {}), ("reasoning", {}),
        ("samplers", []), ("do_sample", False),
    ):  # fmt: skip
        with subtests.test(name):
            check(await client.post(PLAIN, json={**BODIES[PLAIN], name: value}), 400, name)


async def test_thoughts_are_left_out_by_reasoning_exclude(make_http):
    client = make_http(templated())
    for exclude, thought in ((True, None), (False, "hm")):
        body = {**BODIES[CHAT], "reasoning": {"exclude": exclude}}
        message = (await client.post(CHAT, json=body)).json()["choices"][0]["message"]
        assert message["content"] == "hello"
        assert message.get("reasoning_content") == thought
        parts = events((await client.post(CHAT, json=body | {"stream": True})).text)
        deltas = [choice["delta"] for part in parts for choice in part["choices"]]
        thoughts = "".join(delta.get("reasoning_content", "") for delta in deltas)
        assert thoughts == (thought or "")
        body = {"input": "hi", "reasoning": {"exclude": exclude}}
        output = (await client.post("/v1/responses", json=body)).json()["output"]
        texts = [(item["type"], item["content"][0]["text"]) for item in output]
        assert texts == [("reasoning", "hm")] * (not exclude) + [("message", "hello")]


async def test_an_empty_thought_does_not_hide_another_name(make_http, subtests):
    card, blobs = served(template="{{ messages[1].content }}{{ messages[1].reasoning_content }}")
    for thought, text in (
        ({"reasoning_content": "", "reasoning": "hm"}, "hm"),
        ({"reasoning_content": "hm", "reasoning": ""}, "hm"),
        ({"reasoning_content": None, "reasoning": "hm"}, "hm"),
        ({"reasoning_content": "", "reasoning": ""}, ""),
    ):
        with subtests.test(thought):
            router = FakeRouter(saying("x"), [card], blobs)
            turns = [*HI, {"role": "assistant", "content": "a", **thought}, *HI]
            reply = await make_http(router).post(CHAT, json={"model": "tiny", "messages": turns})
            assert reply.status_code == 200, reply.text
            assert list(router.starts[0].prompt_ids) == router.encode("a" + text)


async def test_the_constraint_field_of_vllm_rs(make_http, subtests):
    router = FakeRouter(saying("x"))
    client = make_http(router)
    for more, same in (
        ({"constraint": "[0-9]{3}"}, {"guided_regex": "[0-9]{3}"}),
        ({"constraint": "a", "constraint_type": "regex"}, {"guided_regex": "a"}),
        ({"constraint": 'start: "y"', "constraint_type": "lark"}, {"grammar": 'start: "y"'}),
        ({"constraint": '{"type": "null"}', "constraint_type": "json"},
         {"guided_json": {"type": "null"}}),
    ):  # fmt: skip
        with subtests.test(more):
            for body in (more, same):
                reply = await client.post(PLAIN, json=BODIES[PLAIN] | body)
                assert reply.status_code == 200, reply.text
            one, other = (start.params.grammar for start in router.starts[-2:])
            assert one == other
            assert one.ByteSize()
    for wrong in ({"constraint_type": "json"}, {"regex": "x"}):
        check(await client.post(PLAIN, json={**BODIES[PLAIN], "constraint": "[", **wrong}), 400,
              "constraint")  # fmt: skip


async def test_neutral_samplers_and_other_names(make_http, subtests):
    neutral = {
        "dry_multiplier": 0, "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": -1,
        "dry_sequence_breakers": ["\n"], "guidance_scale": 1.0, "penalty_alpha": 0,
        "repeat_penalty": 1.0, "repeat_last_n": -1, "stop_words": [], "stop_sequences": [],
        "min_new_tokens": 0, "n_cmpl": 1, "typical_p": 1.0, "xtc_probability": 0,
    }  # fmt: skip
    for url, body in BODIES.items():
        with subtests.test(url):
            card, blobs = served(context_len=CONTEXT_LEN)
            router = FakeRouter(saying("x"), [card], blobs)
            client = make_http(router)
            assert (await client.post(url, json=body)).status_code == 200
            reply = await client.post(url, json=body | neutral)
            assert reply.status_code == 200, reply.text
            plain, neutral_params = (start.params for start in router.starts)
            assert neutral_params.repetition_penalty == 1.0
            assert neutral_params == plain
            neutral["repeat_last_n"] = 64
            reply = await client.post(url, json=body | neutral)
            assert reply.status_code == 200, reply.text
            assert router.starts[-1].params == plain
            more = {"repeat_penalty": 1.5, "presence_penalty": 1.0, "frequency_penalty": 1.0}
            for last, wanted in (
                (None, (1.5, 1, 1, 0)), (-1, (1.5, 1, 1, 0)), (0, (1, 0, 0, 0)),
                (64, (1.5, 1, 1, 64)), (2**31 - 1, (1.5, 1, 1, CONTEXT_LEN)),
            ):  # fmt: skip
                reply = await client.post(url, json=body | more | {"repeat_last_n": last})
                assert reply.status_code == 200, reply.text
                params = router.starts[-1].params
                found = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
                assert (*found, params.penalty_window) == wanted
            for alone in (
                {"repeat_penalty": 0.5},
                {"presence_penalty": 1},
                {"frequency_penalty": -1},
            ):
                reply = await client.post(url, json=body | alone | {"repeat_last_n": 7})
                assert reply.status_code == 200, reply.text
                assert router.starts[-1].params.penalty_window == 7
            for wrong, param in (
                ({"repeat_last_n": -2}, "repeat_last_n"),
                ({"repeat_last_n": 2**31}, "repeat_last_n"),
                ({"repeat_penalty": 11}, "repeat_penalty"),
                ({"repeat_penalty": 1.5, "repetition_penalty": 1.2}, "repeat_penalty"),
                ({"guidance_scale": 2.0}, "guidance_scale"),
                ({"dry_multiplier": 0.8}, "dry_multiplier"),
            ):
                check(await client.post(url, json=body | wrong), 400, param)


async def test_a_penalty_window_in_responses(make_http):
    card, blobs = served(generation={"repetition_penalty": 1.25})
    router = FakeRouter(saying("x"), [card], blobs)
    client = make_http(router)
    for last, penalty, window in ((None, 1.25, 0), (64, 1.25, 64), (-1, 1.25, 0), (0, 1.0, 0)):
        reply = await client.post("/v1/responses", json={"input": "a", "repeat_last_n": last})
        assert reply.status_code == 200, reply.text
        params = router.starts[-1].params
        assert (params.repetition_penalty, params.penalty_window) == (penalty, window)


async def test_top_p_0_is_greedy(make_http):
    router = FakeRouter(saying("x"))
    client = make_http(router)
    for url, body in (
        *BODIES.items(), ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {"messages": HI, "max_tokens": 5}),
    ):  # fmt: skip
        reply = await client.post(url, json={**body, "top_p": 0})
        assert reply.status_code == 200, reply.text
        params = router.starts[-1].params
        assert (params.top_k, params.top_p) == (1, 1.0)


async def test_integers_may_be_written_with_a_point(make_http, subtests):
    tool = {"name": "f", "input_schema": {"type": "object"}}
    for url, body, whole in (
        (CHAT, BODIES[CHAT], {
            "n": 2, "max_tokens": 16, "top_k": 3, "seed": 7, "min_tokens": 1, "top_logprobs": 2,
            "stop_token_ids": [5, 6], "truncate_prompt_tokens": 9, "priority": 1,
            "repeat_last_n": -1,
        }),
        (PLAIN, BODIES[PLAIN], {"logprobs": 2, "best_of": 2, "max_tokens": 3, "n": 1}),
        ("/v1/responses", {"input": "a"}, {"max_output_tokens": 5}),
        ("/v1/messages", {"messages": HI, "tools": [tool]}, {"max_tokens": 8, "top_k": 2}),
    ):  # fmt: skip
        with subtests.test(url):
            router = FakeRouter(saying("x"))
            client = make_http(router)
            if "top_logprobs" in whole:
                body = {**body, "logprobs": True}
            floats = {
                name: [float(one) for one in value] if isinstance(value, list) else float(value)
                for name, value in whole.items()
            }
            for more in (whole, floats):
                reply = await client.post(url, json={**body, **more})
                assert reply.status_code == 200, reply.text
            one, other = (start.params for start in router.starts)
            assert one == other
            for name in floats:
                reply = await client.post(url, json={**body, **floats, name: 2.5})
                assert reply.status_code == 400


async def test_the_stop_reason_of_a_choice_is_returned(make_http, subtests):
    router = FakeRouter(saying("hello world"))
    client = make_http(router)
    space = router.encode(" wor")[0]
    for url, body in BODIES.items():
        for more, wanted in (
            ({}, None), ({"stop": ["wor"]}, "wor"), ({"stop_token_ids": [space]}, space),
            ({"max_tokens": 1}, None), ({"stop_token_ids": [router.eos]}, None),
        ):  # fmt: skip
            with subtests.test(url=url, more=more):
                (choice,) = (await client.post(url, json=body | more)).json()["choices"]
                assert choice.get("stop_reason") == wanted
                parts = events((await client.post(url, json=body | more | {"stream": True})).text)
                ended = [c for p in parts for c in p["choices"] if c["finish_reason"]]
                assert [c.get("stop_reason") for c in ended] == [wanted]


async def test_aliases_and_any_name(make_http):
    router = FakeRouter(saying("x"))
    client = make_http(router, aliases=("gpt-4o", "claude=tiny", "lost=other"))
    for name, status in (("gpt-4o", 200), ("claude", 200), ("tiny", 200), ("x", 404)):
        reply = await client.post(CHAT, json={"model": name, "messages": HI})
        assert reply.status_code == status
        if status == 200:
            assert reply.json()["model"] == "tiny"
    check(await client.post(CHAT, json={"model": "lost", "messages": HI}), 404, "model",
          "model_not_found")  # fmt: skip
    listed = (await client.get("/v1/models")).json()["data"]
    ids = [(one["id"], one["root"]) for one in listed]
    assert ids == [("tiny", "tiny"), ("gpt-4o", "tiny"), ("claude", "tiny")]
    versioned = {"anthropic-version": "2023-06-01"}
    page = (await client.get("/v1/models", headers=versioned)).json()
    tags = [(await client.get(f"/api/{path}")).json()["models"] for path in ("tags", "ps")]
    for names in (page["data"], *tags):
        assert [one.get("id", one.get("name")) for one in names] == ["tiny", "gpt-4o", "claude"]
    for one, info in zip(listed, page["data"], strict=True):
        path = f"/v1/models/{one['id']}"
        assert (await client.get(path)).json() == one
        assert (await client.get(path, headers=versioned)).json() == info
    check(await client.get("/v1/models/lost"), 404, "model", "model_not_found")
    anything = make_http(router, any_model=True)
    for path, fields in (
        (CHAT, {"messages": HI}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": HI, "max_tokens": 9}),
        ("/api/chat", {"messages": HI, "stream": False}),
    ):
        reply = await anything.post(path, json={"model": "gpt-4", **fields})
        assert (reply.status_code, reply.json()["model"]) == (200, "tiny"), path
    two = FakeRouter(saying("x"), [served(name)[0] for name in ("one", "two")])
    both = make_http(two, any_model=True, aliases=("gpt-4o", "second=two"))
    for name in ("x", "gpt-4o"):
        reply = await both.post(CHAT, json={"model": name, "messages": HI})
        assert "one, two" in check(reply, 400, "model")["message"]
    assert (await both.post(CHAT, json={"model": "two", "messages": HI})).status_code == 200
    reply = await both.post(CHAT, json={"model": "second", "messages": HI})
    assert reply.json()["model"] == "two"
    hidden = make_http(two, aliases=("one=two",))
    reply = await hidden.post(CHAT, json={"model": "one", "messages": HI})
    assert reply.json()["model"] == "one"
    assert (await hidden.get("/v1/models/one")).json()["root"] == "one"
    assert [one["root"] for one in (await hidden.get("/v1/models")).json()["data"]] == [
        "one",
        "two",
    ]


async def test_the_last_message_is_a_prefix(make_http):
    card, blobs = served(template="{% for m in messages %}[{{ m.content }}]{% endfor %}")
    router = FakeRouter(saying("hello"), [card], blobs)
    client = make_http(router)
    for name in ("prefix", "partial"):
        last = {"role": "assistant", "content": "so", name: True}
        reply = await client.post(CHAT, json={"model": "tiny", "messages": [*HI, last]})
        assert reply.status_code == 200, reply.text
        assert list(router.starts[-1].prompt_ids) == router.encode("[hi][so")
        reply = await client.post(CHAT, json={"model": "tiny", "messages": [last, *HI]})
        check(reply, 400, f"messages[0].{name}")


async def test_a_choice_of_tools_as_an_object(make_http, subtests):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    for kind, same in (("auto", "auto"), ("none", "none"), ("required", "any")):
        with subtests.test(kind):
            router = FakeRouter(saying("x"), *thinking_model())
            client = make_http(router)
            for choice in (kind, {"type": kind}, same, {"type": same}):
                body = {**BODIES[CHAT], "tools": [tool], "tool_choice": choice}
                assert (await client.post(CHAT, json=body)).status_code == 200
            one, *others = router.starts
            assert len(others) == 3
            for other in others:
                assert one.params == other.params
                assert list(one.prompt_ids) == list(other.prompt_ids)


async def test_dropped_parts_are_logged_once(make_http, caplog, subtests):
    strange = [{"type": "text", "text": "a"}, {"type": "a_part_of_tomorrow"}]
    turns = [*HI, {"role": "assistant", "content": strange}] * 2 + HI
    thought = {"type": "reasoning", "summary": [], "content": strange}
    for url, body in ((CHAT, {"messages": turns}), ("/v1/responses", {"input": [*turns, thought]})):
        with subtests.test(url), caplog.at_level("DEBUG"):
            caplog.clear()
            reply = await make_http(saying("x")).post(url, json=body)
            assert reply.status_code == 200, reply.text
            assert caplog.text.count("dropped and logged: parts 'a_part_of_tomorrow'") == 1


FUNCTION = {"name": "f", "parameters": {"type": "object"}}


async def test_no_op_values_are_accepted(make_http, subtests):
    router = FakeRouter(saying("x"))
    client = make_http(router)
    for url, body in BODIES.items():
        assert (await client.post(url, json=body)).status_code == 200
        (plain,) = router.starts
        for fields in (
            {"store": True}, {"stop": ""}, {"stop": ["", ""]}, {"modalities": []}, {"n_keep": 24},
            {"n_keep": -1, "n_discard": 0, "id_slot": -1},
            *([{"top_logprobs": 0}, {"top_logprobs": 0, "logprobs": False}] * (url == CHAT)),
        ):  # fmt: skip
            with subtests.test(url=url, fields=fields):
                reply = await client.post(url, json=body | fields)
                assert reply.status_code == 200, reply.text
                assert router.starts[-1].params == plain.params
        router.starts.clear()


async def test_thinking_named_only_by_its_field(make_http, subtests):
    for fields, text in (
        ({"thinking": {"type": "auto"}}, "hi thinking True True"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "hi thinking True True"),
        ({"reasoning_effort": "max"}, "hi effort max"),
        ({"reasoning": {"effort": "max"}}, "hi effort max"),
        ({"reasoning_effort": "auto"}, "hi"),
        ({"reasoning": {"effort": "default", "summary": "none"}}, "hi"),
    ):
        with subtests.test(fields):
            router = templated()
            reply = await make_http(router).post(CHAT, json=BODIES[CHAT] | fields)
            assert reply.status_code == 200, reply.text
            assert list(router.starts[0].prompt_ids) == router.encode(text)
            assert not router.starts[0].params.HasField("thinking")
    client = make_http(templated())
    for name, value in (
        ("thinking", "disabled"), ("thinking", {"type": "some"}), ("think", "huge"),
        ("thinking", {"type": "enabled", "budget_tokens": -2}),
    ):  # fmt: skip
        with subtests.test(name, value=value):
            reply = await client.post(CHAT, json={**BODIES[CHAT], name: value})
            assert "must be true, false" in check(reply, 400, name)["message"]


async def test_tools_in_the_form_of_the_other_api(make_http, subtests):
    """Accept the fields of a tool beside its type, or in a member named like its type."""
    custom = {"name": "g.h", "description": "a text"}
    forms = (
        [{"type": "function", "function": FUNCTION}, {"type": "custom", "custom": custom}],
        [{"type": "function", **FUNCTION}, {"type": "custom", **custom}],
    )
    for url, body in ((CHAT, BODIES[CHAT]), ("/v1/responses", {"input": "hi"})):
        with subtests.test(url):
            router = ToolModel("x")
            client = make_http(router)
            for tools in forms:
                reply = await client.post(url, json={"tools": tools, **body})
                assert reply.status_code == 200, reply.text
            one, other = router.starts
            assert one.prompt_ids == other.prompt_ids
            assert "tools: f g.h<" in router.prompt(0)


async def test_history_in_the_forms_of_other_clients(make_http, subtests):
    called = {"role": "assistant", "content": None}
    answered = {"role": "function", "name": "f", "content": "1"}
    searched = {"id": "c", "type": "web_search", "web_search": {}}
    thinking = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}]
    parts = [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, "a"]
    for turns, text in (
        ([{"role": "user", "content": ["a", {"text": "b"}]}], "a\nb"),
        ([{"role": "assistant", "content": "a", "reasoning": {"text": "hm"}}], "thought: hm"),
        ([{"role": "assistant", "content": "a", "reasoning": {"id": "r"}}], "assistant\na<"),
        ([{"role": "assistant", "content": "a", "reasoning": [{"text": "hm"}]}], "thought: hm"),
        *(
            ([{"role": "assistant", "content": "a", name: thought}], "thought: hm")
            for name, thought in (
                ("thinking", "hm"), ("thoughts", "hm"), ("thought", "hm"), ("tool_plan", "hm"),
                ("reasoning_details", [{"type": "reasoning.text", "text": "hm"}]),
                ("reasoning_details", [{"type": "reasoning.summary", "summary": "hm"}]),
                ("thinking_blocks", [{"type": "thinking", "thinking": "hm", "signature": "x"}]),
            )
        ),
        ([{"role": "assistant", "content": thinking}], "thought: hm"),
        ([{"role": "assistant", "content": parts}], "thought: hm"),
        ([{**called, "function_call": {"name": "f", "arguments": None}}, answered],
         '{"name": "f", "arguments": {}}'),
        ([{**called, "function_call": {"name": "f", "arguments": {"a": 1}}}, answered],
         '"arguments": {"a": 1}'),
        ([{**called, "content": "a", "tool_calls": [searched]},
          {"role": "tool", "tool_call_id": "c", "content": "r"}],
         "assistant\na<|im_end|>\n<|im_start|>user"),
    ):  # fmt: skip
        with subtests.test(turns):
            router = ToolModel("x", template=TEMPLATE)
            messages = [*HI, *turns, *HI]
            reply = await make_http(router).post(CHAT, json={"model": "tiny", "messages": messages})
            assert reply.status_code == 200, reply.text
            assert text in router.prompt(0)
    turns = [{"role": "user", "content": thinking}]
    reply = await make_http(saying("x")).post(CHAT, json={"model": "tiny", "messages": turns})
    check(reply, 400, "messages[0].content[0].type")
