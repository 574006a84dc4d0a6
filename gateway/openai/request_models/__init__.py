"""Request bodies of OpenAI's chat and completion routes, as pydantic models."""

from pdserve.gateway.openai.request_models.base import B, Body, OwnedBody, parse
from pdserve.gateway.openai.request_models.sampling import PENALTIES, Sampling
from pdserve.gateway.openai.request_models.schema import (
    MAX_MESSAGES,
    MAX_TOOL_CALLS,
    ChatBatchBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TemplateBody,
    TemplateKwargs,
    TokenizeBody,
    TokenizeChatBody,
    parse_tokenize,
    texts_or_ids,
)
from pdserve.gateway.openai.request_models.tools import (
    MODES,
    CustomBody,
    FunctionBody,
    ToolBody,
    tool_use,
)
