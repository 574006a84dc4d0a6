"""Request bodies: one for each POST route, and a value of each served field with its companion
fields.
"""

from typing import Any

from oracles.http_errors import CHAT, HI, PLAIN

from pdserve.gateway.http.thinking import ThinkingFields
from pdserve.gateway.openai.request_models.sampling import StructureFields

RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
INPUT_TOKENS = f"{RESPONSES}/input_tokens"
EMBEDDINGS, FILES, BATCHES = "/v1/embeddings", "/v1/files", "/v1/batches"
BATCH = f"{CHAT}/batch"
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"model": "tiny", "messages": HI},
    BATCH: {"model": "tiny", "messages": [HI]},
    PLAIN: {"model": "tiny", "prompt": "hello"},
    RESPONSES: {"model": "tiny", "input": "hello"},
    INPUT_TOKENS: {"model": "tiny", "input": "hello"},
    EMBEDDINGS: {"model": "embedder", "input": "hello"},
    "/rerank": {"model": "reranker", "query": "a", "documents": ["b", "c"]},
    "/score": {"model": "reranker", "text_1": "a", "text_2": ["b", "c"]},
    MESSAGES: {"model": "tiny", "messages": HI, "max_tokens": 5},
    COUNT: {"model": "tiny", "messages": HI},
    "/api/chat": {"model": "tiny", "messages": HI, "stream": False},
    "/api/generate": {"model": "tiny", "prompt": "hello", "stream": False},
    "/api/embed": {"model": "embedder", "input": "hello"},
    "/api/embeddings": {"model": "embedder", "prompt": "hello"},
    "/api/show": {"model": "tiny"},
    "/apply-template": {"model": "tiny", "messages": HI},
    "/tokenize": {"model": "tiny", "prompt": "hello"},
    "/detokenize": {"model": "tiny", "tokens": [1, 2]},
}
SCHEMA = {"type": "object"}
FUNCTION = {"name": "f", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
TAG = {"begin": "<a>", "schema": SCHEMA, "end": "</a>"}
LOGPROBS = "message.output_text.logprobs"
# A value of each served field, with the fields that it requires.
GIVEN: dict[str, dict[str, Any]] = {
    "output_format": {"output_format": {"type": "json_schema", "schema": SCHEMA}},
    "model": {"model": "tiny"},
    "messages": {"messages": HI},
    "response_format": {"response_format": {"type": "json_object"}},
    "structured_outputs": {"structured_outputs": {"regex": "a"}},
    "guided_json": {"guided_json": SCHEMA},
    "guided_regex": {"guided_regex": "a"},
    "guided_choice": {"guided_choice": ["a"]},
    "guided_grammar": {"guided_grammar": 'root ::= "a"'},
    "regex": {"regex": "a"},
    "ebnf": {"ebnf": 'root ::= "a"'},
    "json_schema": {"json_schema": SCHEMA},
    "grammar": {"grammar": 'root ::= "a"'},
    "structural_tag": {"structural_tag": {"structures": [TAG], "triggers": ["<"]}},
    "constraint": {"constraint": "a", "constraint_type": "regex"},
    "constraint_type": {"constraint": "true", "constraint_type": "json_schema"},
    "enable_thinking": {"enable_thinking": False},
    "think": {"think": "low"},
    "repeat_penalty": {"repeat_penalty": 1.1},
    "repeat_last_n": {"presence_penalty": 1.0, "repeat_last_n": 0},
    "allowed_token_ids": {"allowed_token_ids": [3]},
    "bad_words": {"bad_words": ["x"]},
    "logprob_token_ids": {"logprobs": True, "logprob_token_ids": [3]},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "return_tokens_as_token_ids": {"logprobs": True, "return_tokens_as_token_ids": True},
    "thinking_token_budget": {"thinking_token_budget": 3},
    "thinking_budget": {"thinking_budget": 3},
    "reasoning_budget": {"reasoning_budget": 3},
    "session_id": {"session_id": "s"},
    "user": {"user": "u"},
    "tools": {"messages": HI, "tools": [TOOL]},
    "tool_choice": {"tools": [TOOL], "tool_choice": "auto"},
    "parallel_tool_calls": {"tools": [TOOL], "parallel_tool_calls": False},
    "include_reasoning": {"include_reasoning": False},
    "separate_reasoning": {"separate_reasoning": False},
    "reasoning_format": {"reasoning_format": "none"},
    "input": {"input": "x"},
    "instructions": {"instructions": "be kind"},
    "previous_response_id": {},  # filled in when it is requested
    "store": {"store": False},
    "include": {"include": [LOGPROBS]},
    "max_output_tokens": {"max_output_tokens": 5},
    "max_tool_calls": {"max_tool_calls": 1},
    "text": {"text": {"format": {"type": "json_object"}}},
    "reasoning": {"reasoning": {"effort": "low"}},
    "metadata": {"metadata": {"a": "b"}},
    "safety_identifier": {"safety_identifier": "x"},
    "prompt_cache_key": {"prompt_cache_key": "x"},
    "encoding_format": {"encoding_format": "base64"},
    "dimensions": {"dimensions": 2},
    "normalize": {"normalize": True},
    "embed_dtype": {"embed_dtype": "float32"},
    "endianness": {"endianness": "little"},
    "instruction": {"instruction": "judge"},
    "use_activation": {"use_activation": True},
    "activation": {"activation": True},
    "softmax": {"softmax": True},
    "query": {"query": "x"},
    "documents": {"documents": ["x"]},
    "top_n": {"top_n": 1},
    "return_documents": {"return_documents": False},
    "text_1": {"text_1": "x"},
    "text_2": {"text_2": "x"},
    "items": {"queries": "x", "items": "y"},
    "data_1": {"data_1": "x", "data_2": "y"},
    "data_2": {"data_1": "x", "data_2": "y"},
    "system": {"system": "be kind"},
    "thinking": {"thinking": {"type": "enabled", "budget_tokens": 2}},
    "output_config": {"output_config": {"effort": "low"}},
    "stop_sequences": {"stop_sequences": ["x"]},
    "prompt": {"prompt": [1, 2]},
    "prompt_token_ids": {"prompt_token_ids": [[1, 2], [3]]},
    "tokens": {"tokens": [3]},
    "n": {"n": 2},
    "stream": {"stream": True},
    "stream_options": {"stream": True, "stream_options": {"include_usage": True}},
    "temperature": {"temperature": 0.5},
    "top_p": {"top_p": 0.5},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.1},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "presence_penalty": {"presence_penalty": -1.0},
    "frequency_penalty": {"frequency_penalty": 1},
    "logit_bias": {"logit_bias": {"3": 1}},
    "seed": {"seed": 7},
    "stop": {"stop": ["x"]},
    "stop_token_ids": {"stop_token_ids": [3]},
    "ignore_eos": {"ignore_eos": True},
    "min_tokens": {"min_tokens": 2},
    "max_tokens": {"max_tokens": 5},
    "max_completion_tokens": {"max_completion_tokens": 5},
    "include_stop_str_in_output": {"include_stop_str_in_output": True},
    "skip_special_tokens": {"skip_special_tokens": False},
    "cache_salt": {"cache_salt": "salt"},
    "priority": {"priority": -1},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 3},
    "return_token_ids": {"return_token_ids": True},
    "return_token_strs": {"return_token_strs": True},
    "add_generation_prompt": {"messages": HI, "add_generation_prompt": False},
    "continue_final_message": {
        "messages": [*HI, {"role": "assistant", "content": "x"}], "continue_final_message": True
    },
    "add_special_tokens": {"add_special_tokens": False},
    "chat_template_kwargs": {"messages": HI, "chat_template_kwargs": {"enable_thinking": False}},
    "reasoning_effort": {"messages": HI, "reasoning_effort": "low"},
    "verbosity": {"messages": HI, "verbosity": "low"},
    "logprobs": {"logprobs": True},
    "top_logprobs": {"logprobs": True, "top_logprobs": 2},
    "best_of": {"best_of": 2},
    "echo": {"echo": True},
    "options": {"options": {"num_predict": 3}},
    "format": {"format": "json"},
    "truncate": {"truncate": False},
    "name": {"name": "tiny"},
    "raw": {"raw": True},
}  # fmt: skip
OWN: dict[tuple[str, str], dict[str, Any]] = {  # where a route has another value
    **{
        (BATCH, name): {**given, "messages": [given["messages"]]}
        for name, given in GIVEN.items()
        if "messages" in given
    },
    (BATCH, "n"): {"n": 1},
    (BATCH, "stream"): {"stream": False},
    **{(path, "prompt"): {"prompt": "x"} for path in ("/api/generate", "/api/embeddings")},
    (PLAIN, "logprobs"): {"logprobs": 2},
    (PLAIN, "logprob_token_ids"): {"logprobs": 1, "logprob_token_ids": [3]},
    (PLAIN, "return_tokens_as_token_ids"): {"logprobs": 1, "return_tokens_as_token_ids": True},
    (RESPONSES, "top_logprobs"): {"include": [LOGPROBS], "top_logprobs": 2},
    **{
        (path, name): {"tools": [{"type": "function", **FUNCTION}], **more}
        for path in (RESPONSES, INPUT_TOKENS)
        for name, more in (("tools", {}), ("tool_choice", {"tool_choice": "auto"}))
    },
    **{
        (path, name): {"tools": [{"name": "f", "input_schema": SCHEMA}], **more}
        for path in (MESSAGES, COUNT)
        for name, more in (("tools", {}), ("tool_choice", {"tool_choice": {"type": "auto"}}))
    },
    **{
        (path, name): {name: value}
        for path in (RESPONSES, INPUT_TOKENS)
        for name, value in (
            ("parallel_tool_calls", False),
            ("chat_template_kwargs", {"enable_thinking": False}),
        )
    },
    **{
        (path, "model"): {"model": LEAST[path]["model"]}
        for path in (EMBEDDINGS, "/rerank", "/score", "/api/embed", "/api/embeddings")
    },
    **{
        (path, "truncate_prompt_tokens"): {"truncate_prompt_tokens": -1}
        for path in ("/rerank", "/score")
    },
    **{("/score", name): {"queries": "x", "documents": "y"} for name in ("queries", "documents")},
    ("/tokenize", "prompt"): {"prompt": "x"},
    **{
        ("/tokenize", name): {"messages": HI, **GIVEN[name]}
        for name in (
            *StructureFields.model_fields,
            *ThinkingFields.model_fields,
            "tool_choice",
            "prompt_logprobs",
            "reasoning",
        )
    },
}
