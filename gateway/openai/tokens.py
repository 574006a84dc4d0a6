"""/tokenize and /detokenize, with vLLM's fields."""

from typing import Any

from pdserve.gateway.caller import Caller
from pdserve.gateway.openai.schema import DetokenizeBody, TokenizeBody
from pdserve.gateway.sampling import refuse
from pdserve.gateway.service import Service


async def tokenize(service: Service, body: TokenizeBody, caller: Caller) -> dict[str, Any]:
    """The ids of a prompt, or of messages after the model's template. Raises ServiceError."""
    if (body.prompt is None) == (body.messages is None):
        raise refuse("prompt", "give either prompt or messages")
    owner = caller.tenant.id
    with service.limits.admit(owner):
        await service.count(caller)
        model = await service.catalog.get(body.model)
        if body.messages is not None:
            messages = [m.as_template() for m in body.messages]
            ids = await service.chat_ids(model, messages, owner, answer=body.add_generation_prompt)
        else:
            ids = await service.text_ids(
                model,
                body.prompt or "",
                "prompt",
                owner,
                add_special_tokens=body.add_special_tokens,
            )
        texts = await service.token_texts(model, ids, owner) if body.return_token_strs else None
        return {
            "count": len(ids),
            "max_model_len": model.card.context_len,
            "tokens": ids,
            "token_strs": texts,
        }


async def detokenize(service: Service, body: DetokenizeBody, caller: Caller) -> dict[str, Any]:
    """The text of ids. Raises ServiceError."""
    owner = caller.tenant.id
    with service.limits.admit(owner):
        await service.count(caller)
        model = await service.catalog.get(body.model)
        skip = body.skip_special_tokens
        prompt = await service.decode(model, body.tokens, "tokens", owner, skip_special=skip)
        return {"prompt": prompt}
