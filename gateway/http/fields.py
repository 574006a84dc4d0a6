"""Fields of several servers' APIs. A route refuses by name, or ignores on purpose, those that it
does not serve.

A field that would change the answer is never ignored silently: each field that a route serves and
that can change an answer is in REFUSED, for the routes that do not serve it.
"""

from collections.abc import Collection, Mapping
from typing import Any

from pdserve.engine.api import BOUNDS
from pdserve.gateway.http.validation import NOTHING, asks_nothing

# fmt: off
# Fields that change a generated answer alone; routes without one ignore them.
OF_ANSWERS = (
    *(name for name in BOUNDS if name != "penalty_window"),  # which is repeat_last_n
    "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "allowed_token_ids",
    "bad_words", "repeat_penalty", "repeat_last_n", "logprob_token_ids", "add_special_tokens",
    "skip_special_tokens", "return_tokens_as_token_ids", "cache_salt", "reasoning_effort",
    "thinking_token_budget", "thinking_budget", "reasoning_budget", "verbosity", "response_format",
    "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "regex", "ebnf", "json_schema", "grammar", "structural_tag", "constraint", "constraint_type",
    "input", "instructions", "previous_response_id", "max_tool_calls", "text", "output_config",
    "output_format",
)

# Fields that some routes serve.
ELSEWHERE = (
    *OF_ANSWERS,
    "echo", "prompt", "messages", "top_logprobs", "max_completion_tokens", "tools", "tool_choice",
    "include_reasoning", "separate_reasoning", "truncate_prompt_tokens",
)

# Fields of REFUSED that change a prompt.
OF_PROMPTS = (
    "tools", "functions", "documents", "chat_template", "truncate_prompt_tokens", "truncate",
    "prompt_truncate_len",
)

# Refused unless the value is one of these. The comments name the server that has the field.
REFUSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(ELSEWHERE, NOTHING),
    **dict.fromkeys(
        (
            # OpenAI
            "suffix", "functions", "audio", "moderation",
            # vLLM
            "guided_decoding_backend", "guided_whitespace_pattern", "use_beam_search",
            "chat_template", "chat_template_kwargs",
            "prompt_embeds", "lora_request", "documents", "continue_final_message",
            "prompt_token_ids", "return_token_ids", "logits_processors",
            "mm_processor_kwargs", "media_io_kwargs", "kv_transfer_params",
            "vllm_xargs", "repetition_detection",
            # SGLang
            "stop_regex", "no_stop_trim", "custom_logit_processor",
            "custom_params", "lora_path", "session_params", "return_hidden_states",
            "return_routed_experts", "input_ids", "input_embeds", "image_data", "video_data",
            "audio_data", "return_logprob",
            # llama.cpp
            "grammar_lazy", "lora", "input_prefix", "input_extra",
            "response_fields", "return_progress",
            "post_sampling_probs", "return_tokens", "multimodal_data",
            # text-generation-inference, Mistral, Hugging Face, text-generation-webui
            "adapter_id", "decoder_input_details", "watermark", "details", "parameters", "inputs",
            "safe_prompt", "bad_words_ids", "early_stopping",
            "banned_tokens", "banned_strings",
            # Ollama
            "options", "format", "images", "raw", "system",
            # Other servers' names, below
            "stop_words", "stop_token", "stop_sequences", "random_seed", "truncate",
            "prompt_truncate_len",
        ),
        NOTHING,
    ),
    # Fields of thinking, and others whose false or empty value requests something.
    **dict.fromkeys(
        ("enable_thinking", "think", "thinking", "reasoning", "samplers"),
        (None,),
    ),
    "reasoning_format": (None, "", "auto", "deepseek", "parsed"),
    **dict.fromkeys(
        (
            "max_tokens", "max_completion_tokens", "n_predict", "num_predict", "max_new_tokens",
            "max_output_tokens", "max_length", "thinking_token_budget", "thinking_budget",
            "reasoning_budget",
        ),
        (None, -1),
    ),
    **dict.fromkeys(("min_p", "presence_penalty", "frequency_penalty"), (None, 0.0)),
    **dict.fromkeys(("top_p", "repetition_penalty", "repeat_penalty"), (None, 1.0)),
    **dict.fromkeys(("min_tokens", "min_new_tokens"), (None, 0)),
    **dict.fromkeys(("n", "n_cmpl"), (None, 1)),
    "top_k": (None, -1, 0),
    "repeat_last_n": (None, -1),
    "skip_special_tokens": (None, True),
    "response_format": (*NOTHING, {"type": "text"}),
    "text": (*NOTHING, {"format": {"type": "text"}}),
    "penalty_alpha": (None, 0.0),
    "guidance_scale": (None, 1.0),
    "best_of": (None, 1),
    "tool_choice": (None, "none", "auto"),
    "function_call": (None, "none", "auto"),
    "parallel_tool_calls": (None, True),
    "modalities": (None, [], ["text"]),
    "add_generation_prompt": (None, True),
    "spaces_between_special_tokens": (None, True),
    "include_reasoning": (None, True),
    "separate_reasoning": (None, True),
    "length_penalty": (None, 1.0),
    "num_beams": (None, 1),
    "no_repeat_ngram_size": (None, 0),
    "min_length": (None, 0),
    "truncation_side": (None, "left"),
    "typical_p": (None, 1.0),
    "tfs_z": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "top_a": (None, 0.0),
    "min_keep": (None, 0),
    "mirostat": (None, 0),
    "mirostat_mode": (None, 0),
    "dynatemp_range": (None, 0.0),
    "smoothing_factor": (None, 0.0),
    "xtc_probability": (None, 0.0),
    "dry_multiplier": (None, 0.0),
    "top_n_sigma": (None, -1.0, 0.0),
    "n_probs": (None, 0),
    "n_indent": (None, 0),
    "t_max_predict_ms": (None, 0),
    "do_sample": (None, True),
    "return_full_text": (None, False),
    "top_n_tokens": (None, 0),
    "top_logprobs_num": (None, 0),
}
# fmt: on

# Fields of REFUSED that routes without a generated answer check.
OF_ALL = REFUSED.keys() - OF_ANSWERS

# Other servers' names, all in REFUSED, for fields that this one serves.
OTHER_NAMES: dict[str, str] = {
    "max_completion_tokens": "max_tokens",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "max_length": "max_tokens",
    "random_seed": "seed",
    "n_cmpl": "n",
    "stop_words": "stop",
    "stop_token": "stop",
    "prompt_truncate_len": "truncate_prompt_tokens",
    "min_new_tokens": "min_tokens",
    "stop_sequences": "stop",
    "truncate": "truncate_prompt_tokens",
    "n_probs": "logprobs",
    "functions": "tools",
    "function_call": "tool_choice",
    "input_ids": "prompt",
    "top_logprobs_num": "logprobs",
    "decoder_input_details": "prompt_logprobs",
}

# They change no answer of this server.
IGNORED: frozenset[str] = frozenset(
    (
        # OpenAI
        "metadata", "service_tier", "prediction", "store",
        "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "prompt_cache_options",
        # vLLM, SGLang
        "request_id", "rid", "stream_reasoning",
        # llama.cpp
        "cache_prompt", "id_slot", "n_keep", "n_discard", "timings_per_token", "mirostat_tau",
        "mirostat_eta", "dynatemp_exponent", "xtc_threshold", "dry_base",
        "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers",
        # Ollama
        "keep_alive",
    )
)  # fmt: skip

# They offer tools that cannot be run here.
LEFT_OUT: frozenset[str] = frozenset(("web_search_options",))

# For counting usage, and for a request's place among its tenant's. Routes that do not use them
# ignore them.
OF_REQUESTS = frozenset(("user", "session_id", "priority"))


def refused_field(body: Mapping[str, Any], served: Collection[str]) -> tuple[str, str] | None:
    """Return the name of the first field of `body` that requests what is not `served`, and why it
    is refused; None if there is no such field."""
    for name, value in body.items():
        if name in served:
            continue
        if name in REFUSED and not asks_nothing(value, REFUSED[name]):
            reason = "a field of this request" if name in ELSEWHERE else "supported by this server"
            return name, f"{name} is not {reason}{_instead(name, served)}"
    return None


def _instead(name: str, served: Collection[str]) -> str:
    other = OTHER_NAMES.get(name)
    return f"; use {other}" if other in served else ""
