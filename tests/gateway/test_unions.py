"""Every member of the unions in the client packages of OpenAI and Anthropic has a row in a table;
the tables are on the API page."""

import typing
from collections.abc import Iterator
from types import UnionType
from typing import Any

import anthropic.types as anthropic_types
import anthropic.types.beta as anthropic_beta
import openai.types.chat as openai_chat
import openai.types.responses as openai_responses
import openai.types.shared as shared
import pytest
import typing_extensions
from anthropic.types import document_block_param, tool_result_block_param
from anthropic.types.beta import (
    beta_context_management_config_param,
    beta_request_document_block_param,
    beta_tool_result_block_param,
)
from openai.types.chat import chat_completion_assistant_message_param
from openai.types.responses import (
    namespace_tool_param,
    response_create_params,
    response_input_item_param,
)

from pdserve.gateway.anthropic import conversation as messages
from pdserve.gateway.anthropic.request_models import MessageTurn
from pdserve.gateway.http.fields import EntryTypes
from pdserve.gateway.openai.request_models import base as chat
from pdserve.gateway.openai.responses import tools as responses
from pdserve.text import EFFORTS

_WRAPPERS = (typing.Annotated, typing_extensions.Required, typing_extensions.NotRequired)


def members(union: Any) -> Iterator[Any]:
    """The types of a union, and of the unions within it."""
    while typing.get_origin(union) in (*_WRAPPERS, typing.Required, typing.NotRequired):
        union = typing.get_args(union)[0]
    if typing.get_origin(union) in (typing.Union, UnionType):
        for one in typing.get_args(union):
            yield from members(one)
    else:
        yield union


def literals(kind: Any) -> Iterator[str]:
    for one in members(kind):
        if typing.get_origin(one) is typing.Literal:
            yield from typing.get_args(one)


def named(union: Any, field: str = "type") -> set[str]:
    """The values of `field` in the dictionaries of a union, and the strings among its members."""
    found = set(literals(union))
    for one in members(union):
        if typing_extensions.is_typeddict(one):
            found |= set(literals(typing.get_type_hints(one)[field]))
    return found


def content(message: Any) -> Any:
    """The union of a message's parts."""
    (parts,) = [
        typing.get_args(one)[0]
        for one in members(typing.get_type_hints(message)["content"])
        if one is not str and typing.get_args(one)
    ]
    return parts


ASSISTANT_PARTS = chat_completion_assistant_message_param.ContentArrayOfContentPart
RESULT, BETA_RESULT = tool_result_block_param.Content, beta_tool_result_block_param.Content
CASES: list[tuple[EntryTypes, Any, str]] = [
    (chat.ROLES, openai_chat.ChatCompletionMessageParam, "role"),
    (chat.PARTS, openai_chat.ChatCompletionContentPartParam, "type"),
    (chat.PARTS, ASSISTANT_PARTS, "type"),
    (chat.CALLS, openai_chat.ChatCompletionMessageToolCallUnionParam, "type"),
    (chat.TOOLS, openai_chat.ChatCompletionToolUnionParam, "type"),
    (chat.TOOL_CHOICES, openai_chat.ChatCompletionToolChoiceOptionParam, "type"),
    (responses.ITEMS, openai_responses.ResponseInputItemParam, "type"),
    (responses.PARTS, openai_responses.ResponseInputContentParam, "type"),
    (responses.PARTS, content(openai_responses.ResponseOutputMessageParam), "type"),
    (responses.ROLES, response_input_item_param.Message, "role"),
    (responses.ROLES, openai_responses.EasyInputMessageParam, "role"),
    (responses.TOOLS, openai_responses.ToolParam, "type"),
    (responses.TOOLS, namespace_tool_param.Tool, "type"),
    (responses.TOOL_CHOICES, response_create_params.ToolChoice, "type"),
    *(
        case
        for types, prefix in ((anthropic_types, ""), (anthropic_beta, "Beta"))
        for case in (
            (messages.ROLES, getattr(types, f"{prefix}MessageParam"), "role"),
            (messages.USER_BLOCKS, getattr(types, f"{prefix}ContentBlockParam"), "type"),
            (messages.ASSISTANT_BLOCKS, getattr(types, f"{prefix}ContentBlockParam"), "type"),
            (messages.TOOLS, getattr(types, f"{prefix}ToolUnionParam"), "type"),
            (messages.TOOL_CHOICES, getattr(types, f"{prefix}ToolChoiceParam"), "type"),
            (messages.THINKING, getattr(types, f"{prefix}ThinkingConfigParam"), "type"),
            (messages.SYSTEM_BLOCKS, content(getattr(types, f"{prefix}SystemMessageParam")), ""),
        )
    ),
    (messages.EDITS, beta_context_management_config_param.Edit, "type"),
    (messages.SOURCES, document_block_param.Source, "type"),
    (messages.SOURCES, beta_request_document_block_param.Source, "type"),
    (messages.SOURCE_BLOCKS, content(anthropic_types.ContentBlockSourceParam), "type"),
    (messages.SOURCE_BLOCKS, content(anthropic_beta.BetaContentBlockSourceParam), "type"),
    (messages.RESULT_BLOCKS, RESULT, "type"),
    (messages.RESULT_BLOCKS, BETA_RESULT, "type"),
]


def test_every_member_has_a_row(subtests: pytest.Subtests) -> None:
    for table, union, field in CASES:
        known = named(union, field or "type")
        with subtests.test(union=str(union)[:120]):
            assert known, "the package must list the members"
            assert known <= table.keys(), "every member must have a row"


def test_every_field_of_a_message_is_known() -> None:
    for union in (anthropic_types.MessageParam, anthropic_beta.BetaMessageParam):
        for kind in members(union):
            known = typing.get_type_hints(kind).keys()
            assert {"role", "content"} <= known <= MessageTurn.model_fields.keys()


def test_every_value_of_a_hint_is_accepted() -> None:
    assert set(literals(shared.ReasoningEffort)) == set(EFFORTS)


def test_a_new_member_would_be_noticed() -> None:
    known = named(openai_responses.ToolParam)
    assert len(known) > 10
    assert not known <= {name: row for name, row in responses.TOOLS.items() if name != "mcp"}.keys()
