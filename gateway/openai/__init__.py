"""OpenAI's API: chats, completions, embeddings, models."""

from pdserve.gateway.openai.api import OpenAiDialect
from pdserve.gateway.openai.embeddings import (
    MAX_INPUTS,
    EmbeddingBody,
    EmbeddingReply,
    embedding_ids,
)
from pdserve.gateway.openai.errors import error_object
from pdserve.gateway.openai.models import capabilities, llama_sampling
from pdserve.gateway.openai.parts import with_top
from pdserve.gateway.openai.response_models import ErrorObject, PromptUsage, ScoredChatToken
