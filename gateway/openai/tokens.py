"""/tokenize and /detokenize, with vLLM's fields."""

from typing import Any

from pdserve.gateway.openai.schema import DetokenizeBody, TokenizeBody
from pdserve.gateway.sampling import refuse
from pdserve.gateway.service import Service
from pdserve.gateway.text.errors import TextError


async def tokenize(service: Service, body: TokenizeBody) -> dict[str, Any]:
    """The ids of a prompt, or of messages after the model's template. Raises ServiceError."""
    if (body.prompt is None) == (body.messages is None):
        raise refuse("prompt", "give either prompt or messages")
    with service.limits.admit():
        model = await service.catalog.get(body.model)
        if body.messages is not None:
            messages = [m.as_template() for m in body.messages]
            ids = await service.chat_ids(model, messages, answer=body.add_generation_prompt)
        else:
            ids = await service.text_ids(
                model, body.prompt or "", "prompt", add_special_tokens=body.add_special_tokens
            )
        tokenizer = model.text.tokenizer
        return {
            "count": len(ids),
            "max_model_len": model.card.context_len,
            "tokens": ids,
            "token_strs": (
                [tokenizer.token_text(token) for token in ids] if body.return_token_strs else None
            ),
        }


async def detokenize(service: Service, body: DetokenizeBody) -> dict[str, Any]:
    """The text of ids. Raises ServiceError."""
    with service.limits.admit():
        model = await service.catalog.get(body.model)
        try:
            model.text.tokenizer.check_ids(body.tokens)
        except TextError as error:
            raise refuse("tokens", str(error)) from error
        prompt = await service.decode(model, body.tokens, skip_special=body.skip_special_tokens)
        return {"prompt": prompt}
