"""The prompt of /v1/responses and /v1/responses/input_tokens: the conversation, with its kept part,
and the tools."""

import re
from collections.abc import Sequence
from typing import Any

from pydantic_core import from_json

from pdserve.gateway.caller import Caller
from pdserve.gateway.http import SERVED_TYPE, BodyReader, CodedError, Handling, log_unsupported
from pdserve.gateway.openai.responses.items import (
    MAX_ITEMS,
    REFERENCE,
    Item,
    conversation,
    last_effort,
    parse_input,
)
from pdserve.gateway.openai.responses.request_model import InputTokensBody
from pdserve.gateway.openai.responses.tools import ITEMS, parse_tools, tool_use
from pdserve.gateway.sampling import refuse
from pdserve.gateway.service import Service
from pdserve.gateway.storage import ResponseStore
from pdserve.protos.common_pb2 import INVALID_ARGUMENT
from pdserve.services.common.errors import quoted
from pdserve.text import ChatCompletionRequest, RequestedSampling, TemplateInput

# The ids of a response's items contain the response's own id; input items have "in" before their
# number.
_ITEM_ID = re.compile(r"[a-z]+_([^/]+)_(in)?[0-9]+")
PARSED_RATIO = 3  # memory of a kept response in use, relative to the bytes of its text


class ResponsePrompt:
    """Converter of a checked request body to the request for the model."""

    def __init__(
        self, body: InputTokensBody, caller: Caller, bodies: BodyReader, store: ResponseStore | None
    ) -> None:
        """Without a store nothing is kept. Raises ServiceError for fields that contradict each
        other."""
        self._body = body
        self._caller = caller
        self._bodies = bodies
        self._store = store
        self._items = parse_input(body.input)
        self.offer = parse_tools(body.tools or ())

    async def items(self) -> list[Item]:
        """Return the whole conversation. Raises ServiceError."""
        earlier = await self._earlier_items()
        items = [*earlier, *await self._resolved(earlier)]
        if len(items) > MAX_ITEMS:
            text = f"at most {MAX_ITEMS} items including the earlier ones, not {len(items)}"
            raise refuse("input", text)
        return items

    def request(self, items: list[Item], sampling: RequestedSampling) -> ChatCompletionRequest:
        """Return the chat for these items. Raises ServiceError."""
        lists = [i["tools"] for i in items if "tools" in i and ITEMS.get(i["type"]) is SERVED_TYPE]
        if lists:
            self.offer = self.offer.with_more(lists)
        log_unsupported(Handling.LEFT_OUT, "tools", self.offer.left_out)
        body = self._body
        template = TemplateInput(
            conversation(body.instructions, items),
            variables=body.chat_template_kwargs or {},
            suggested=body.template_variables(last_effort(items)),
            messages_field="input",
        )
        tools_in_use = tool_use(self.offer, body.tool_choice, body.parallel_tool_calls is not False)
        return ChatCompletionRequest(body.model, template, sampling, tool_use=tools_in_use)

    async def _resolved(self, earlier: Sequence[Item]) -> list[Item]:
        """Return the items of the request, with those that it refers to."""
        if all(item["type"] != REFERENCE for item in self._items):
            return self._items
        all_items = [*earlier, *self._items]
        items_by_id = {i["id"]: i for i in all_items if "id" in i and i["type"] != REFERENCE}
        resolved = []
        for item in self._items:
            if item["type"] == REFERENCE and item["id"] not in items_by_id:
                await self._learn(item["id"], item["at"], items_by_id)
            resolved.append(items_by_id[item["id"]] if item["type"] == REFERENCE else item)
        return resolved

    async def _learn(self, name: str, path: str, items_by_id: dict[str, Item]) -> None:
        """Add the items of the response that has an item of this name. Raises ServiceError if there
        is no such response."""
        match = _ITEM_ID.fullmatch(name)
        if match is not None and self._store is not None:
            stored = await self._store.find(self._caller.tenant.id, f"resp_{match[1]}")
            if stored is not None:
                text = stored.items if match[2] else stored.response
                self._bodies.hold(self._caller, PARSED_RATIO * len(text))
                value = from_json(text)
                items = value if match[2] else value["output"]
                items_by_id.update((item["id"], item) for item in items)
        if name not in items_by_id:
            problem = (
                "was not found" if self._store else "was not found: this server stores no responses"
            )
            raise refuse(path, f"{path}: the item {quoted(name)} {problem}")

    async def _earlier_items(self) -> list[Item]:
        """Return the conversation that the request continues."""
        name = self._body.previous_response_id
        if not name:
            return []
        field = "previous_response_id"
        if self._store is None:
            raise refuse(field, f"{field}: this server stores no responses")
        stored = await self._store.find(self._caller.tenant.id, name)
        if stored is None:
            text = f"the previous response {quoted(name)} was not found"
            raise CodedError(INVALID_ARGUMENT, text, field, "previous_response_not_found")
        self._bodies.hold(self._caller, PARSED_RATIO * stored.num_bytes)
        return [*from_json(stored.items), *from_json(stored.response)["output"]]


async def count_input_tokens(
    service: Service,
    body: InputTokensBody,
    caller: Caller,
    bodies: BodyReader,
    store: ResponseStore | None,
) -> dict[str, Any]:
    """Return the number of tokens of a response's prompt. Raises ServiceError."""
    prompt = ResponsePrompt(body, caller, bodies, store)
    sampling = RequestedSampling(structure=body.structure())
    request = prompt.request(await prompt.items(), sampling)
    count = await service.count_prompt(request, caller)
    return {"object": "response.input_tokens", "input_tokens": count}
