"""Tables of the request features that are supported: the fields of several servers' APIs, and the
types of a request's entries (roles, content parts, tools and input items).

Every field that could change the response, and that some route serves, is in REFUSED_FIELDS: the
other routes return an error for it instead of ignoring it. Each API has tables that say how each
type of entry is handled; its code uses them, and docs/api.md is generated from them. Pure except
for logging.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic_core import to_json

from pdserve.engine.api import BOUNDS
from pdserve.services.common.errors import MAX_QUOTED, cut

NEUTRAL_VALUES: tuple[Any, ...] = (None, False, "", [], {})
"""Values with which a field requests nothing, unless REFUSED_FIELDS lists others for it."""

# fmt: off
# Fields that change only generated text; routes that generate none ignore them.
GENERATION_FIELDS = (
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

# Fields that some routes serve; others refuse them.
SERVED_FIELDS = (
    *GENERATION_FIELDS,
    "echo", "prompt", "messages", "top_logprobs", "max_completion_tokens", "tools", "tool_choice",
    "include_reasoning", "separate_reasoning", "truncate_prompt_tokens",
)

# Fields of REFUSED_FIELDS that change a prompt.
PROMPT_FIELDS = (
    "tools", "functions", "documents", "chat_template", "truncate_prompt_tokens", "truncate",
    "prompt_truncate_len",
)

# Refused unless the value is one of these. The comments name the server that has the field.
REFUSED_FIELDS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(SERVED_FIELDS, NEUTRAL_VALUES),
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
        NEUTRAL_VALUES,
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
    "response_format": (*NEUTRAL_VALUES, {"type": "text"}),
    "text": (*NEUTRAL_VALUES, {"format": {"type": "text"}}),
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

# Fields of REFUSED_FIELDS that are checked by routes that generate no text.
NON_GENERATION_FIELDS = REFUSED_FIELDS.keys() - GENERATION_FIELDS

# Other servers' names, all in REFUSED_FIELDS, for fields that this one serves.
FIELD_ALIASES: dict[str, str] = {
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

# Fields that change no response of this server.
IGNORED_FIELDS: frozenset[str] = frozenset(
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

# Fields that offer tools which cannot run here; they are left out and logged.
OMITTED_FIELDS: frozenset[str] = frozenset(("web_search_options",))

# For counting usage, and for a request's place among its tenant's. Routes that do not use them
# ignore them.
REQUEST_FIELDS = frozenset(("user", "session_id", "priority"))


def is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Return whether `value` is one of `neutral`, the values with which a field requests nothing.
    Unlike in Python, true is not equal to 1 and false is not equal to 0."""
    return any(
        value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral
    )


log = logging.getLogger(__name__)

MAX_DEPTH = 16  # of a value that is kept as text
# Keys whose values only their provider can read, or that mean nothing to a model.
_OPAQUE = {"signature", "cache_control", "citations", "call_id", "tool_use_id", "data", "image_url"}


class Handling(StrEnum):
    """How a type of entry in a request is handled: served, left out, kept as text, dropped,
    accepted without effect, or refused."""

    SERVED = "served"
    LEFT_OUT = "left out and logged"  # offers the model something that cannot run here
    AS_TEXT = "kept as text"  # history
    DROPPED = "dropped and logged"  # history that means nothing to a model here
    HINT = "accepted"  # changes no answer
    REFUSED = "refused by name"  # would change the answer, and is not supported


@dataclass(frozen=True, slots=True)
class EntryType:
    """How request entries of one type (a tool, a content part, an input item) are handled. `text`:
    the fields that are kept if the entry is converted to text. `of_client`: the client wrote the
    entry; otherwise the model or its provider wrote it."""

    handling: Handling
    text: tuple[str, ...] = ()
    of_client: bool = False

    def as_text(self, kind: str, value: Mapping[str, Any]) -> str:
        """Convert an entry of the conversation's history to text: a line `[kind]`, then the values
        of the kept fields."""
        values = {name: _readable(value[name], MAX_DEPTH) for name in self.text if name in value}
        lines = [
            item if isinstance(item, str) else to_json(item).decode()
            for item in values.values()
            if item not in (None, "", [], {})
        ]
        return "\n".join([f"[{kind}]", *lines])


EntryTypes = Mapping[str, EntryType]

SERVED_TYPE, OMITTED_TYPE, ACCEPTED_TYPE = (
    EntryType(Handling.SERVED),
    EntryType(Handling.LEFT_OUT),
    EntryType(Handling.HINT),
)
DROPPED_TYPE, REFUSED_TYPE = EntryType(Handling.DROPPED), EntryType(Handling.REFUSED)


def kept_as_text(*fields: str, of_client: bool = False) -> EntryType:
    """Return the EntryType of history entries that are converted to text, of which `fields` are
    kept."""
    return EntryType(Handling.AS_TEXT, fields, of_client)


def log_unsupported(handling: Handling, subject: str, kinds: Iterable[str]) -> None:
    """Log which types of entries, or which fields, of a request are left out or dropped. Does
    nothing without `kinds`."""
    if names := sorted(set(kinds)):
        log.debug(
            "a request has unsupported fields or entries, which are %s: %s",
            handling.value,
            cut(f"{subject} {', '.join(map(repr, names))}", MAX_QUOTED),
        )


def _readable(value: Any, depth: int) -> Any:
    """Return a field's value for the model: without parts that only the provider of the entry can
    read, such as signatures and encrypted content, with text parts joined to one text."""
    if isinstance(value, Mapping):
        if not depth:
            return None
        if value.get("type") in ("text", "input_text", "output_text", "summary_text"):
            return value.get("text")
        return {
            name: _readable(item, depth - 1)
            for name, item in value.items()
            if name not in _OPAQUE and not name.startswith("encrypted_")
        }
    if isinstance(value, list | tuple):
        if not depth:
            return None
        values = [_readable(item, depth - 1) for item in value]
        texts = values and all(isinstance(item, str) for item in values)
        return "\n".join(values) if texts and isinstance(value[0], Mapping) else values
    return value
