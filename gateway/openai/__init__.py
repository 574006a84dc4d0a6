"""OpenAI's HTTP API: chats, responses, completions, embeddings, models, files, batches and
usage."""

from pdserve.gateway.openai.api import OpenAiApi
from pdserve.gateway.openai.embeddings import (
    MAX_INPUTS,
    EmbeddingBody,
    EmbeddingReply,
    embedding_ids,
)
from pdserve.gateway.openai.objects import OpenAiErrors, token_logprobs
from pdserve.gateway.openai.response_models import ErrorObject, PromptUsage, ScoredChatToken
from pdserve.gateway.openai.server_info import capabilities, llama_sampling
