"""What /v1/responses and /v1/responses/input_tokens ask a model: the conversation, with what is
kept of it, and the tools."""

from typing import Any

from pydantic_core import from_json

from pdserve.gateway.http.body import BodyReader
from pdserve.gateway.http.dialect import CodedError
from pdserve.gateway.openai.responses.items import MAX_ITEMS, Item, conversation, parse_input
from pdserve.gateway.openai.responses.schema import InputTokensBody
from pdserve.gateway.openai.responses.tools import parse_tools, tool_use
from pdserve.gateway.requests.caller import Caller
from pdserve.gateway.requests.completions import ChatCompletionRequest
from pdserve.gateway.requests.sampling import RequestedSampling
from pdserve.gateway.sampling import refuse
from pdserve.gateway.service import Service
from pdserve.gateway.storage.response_store import ResponseStore
from pdserve.gateway.text.messages import TemplateInput
from pdserve.protos.common_pb2 import INVALID_ARGUMENT
from pdserve.services.host.errors import quoted

PARSED_RATIO = 3  # bytes that a kept response takes while it is used, to those of its text


class ResponsePrompt:
    """Turns the body of a request, once it is checked, into what the model is asked."""

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
        self.tools = parse_tools(body.tools or ())
        self._tool_use = tool_use(
            self.tools, body.tool_choice, body.parallel_tool_calls is not False
        )

    async def items(self) -> list[Item]:
        """The whole conversation. Raises ServiceError."""
        items = [*await self._earlier_items(), *self._items]
        if len(items) > MAX_ITEMS:
            text = f"at most {MAX_ITEMS} items with those before, not {len(items)}"
            raise refuse("input", text)
        return items

    def request(self, items: list[Item], sampling: RequestedSampling) -> ChatCompletionRequest:
        """Raises ServiceError."""
        template = TemplateInput(
            conversation(self._body.instructions, items),
            suggested=self._body.template_variables(),
            messages_field="input",
        )
        return ChatCompletionRequest(self._body.model, template, sampling, tool_use=self._tool_use)

    async def _earlier_items(self) -> list[Item]:
        """The conversation that the request goes on with."""
        name = self._body.previous_response_id
        if name is None:
            return []
        field = "previous_response_id"
        if self._store is None:
            raise refuse(field, f"{field}: this server keeps no responses")
        found = await self._store.find(self._caller.tenant.id, name)
        if found is None:
            text = f"the previous response {quoted(name)} was not found"
            raise CodedError(INVALID_ARGUMENT, text, field, "previous_response_not_found")
        self._bodies.hold(self._caller, PARSED_RATIO * found.num_bytes)
        return [*from_json(found.items), *from_json(found.response)["output"]]


async def count_input_tokens(
    service: Service,
    body: InputTokensBody,
    caller: Caller,
    bodies: BodyReader,
    store: ResponseStore | None,
) -> dict[str, Any]:
    """How many tokens a response's prompt has. Raises ServiceError."""
    prompt = ResponsePrompt(body, caller, bodies, store)
    sampling = RequestedSampling(structure=body.structure())
    asked = prompt.request(await prompt.items(), sampling)
    count = await service.count_prompt(asked, caller)
    return {"object": "response.input_tokens", "input_tokens": count}
