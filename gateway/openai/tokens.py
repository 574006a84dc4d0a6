"""/tokenize and /detokenize, with vLLM's fields."""

from typing import Any

from pdserve.gateway.openai.bodies.schema import DetokenizeBody, TokenizeBody, TokenizeChatBody
from pdserve.gateway.requests.caller import Caller
from pdserve.gateway.service import Service


async def tokenize(
    service: Service, body: TokenizeBody | TokenizeChatBody, caller: Caller
) -> dict[str, Any]:
    """Return the ids of a prompt, or of messages after the template. Raises ServiceError."""
    owner = caller.tenant.id
    with service.limits.admit(owner):
        await service.count(caller)
        model = await service.catalog.get(body.model)
        if isinstance(body, TokenizeChatBody):
            ids = await service.prompt_ids(body.chat_request(), model, caller)
        else:
            ids = await service.texts.text_ids(
                model, body.prompt, "prompt", owner, add_special_tokens=body.add_special_tokens
            )
        pieces = (
            await service.texts.token_pieces(model, ids, owner) if body.return_token_strs else None
        )
        return {
            "count": len(ids),
            "max_model_len": model.card.context_len,
            "tokens": ids,
            "token_strs": pieces,
        }


async def detokenize(service: Service, body: DetokenizeBody, caller: Caller) -> dict[str, Any]:
    """Return the text of ids. Raises ServiceError."""
    owner = caller.tenant.id
    with service.limits.admit(owner):
        await service.count(caller)
        model = await service.catalog.get(body.model)
        skip = body.skip_special_tokens
        prompt = await service.texts.decode(model, body.tokens, "tokens", owner, skip_special=skip)
        return {"prompt": prompt}
