"""The HTTP shell that carries every API: server, bounds, errors, streams, documentation."""

from pdserve.gateway.http.api import (
    REQUEST_ID,
    CodedError,
    Dialect,
    ErrorShape,
    Event,
    HttpError,
    HttpLimits,
    dialect_of,
    error_response,
    json_event,
    sent_event,
)
from pdserve.gateway.http.app import create_app, create_routes
from pdserve.gateway.http.body import MAX_VALUES, VALUE_BYTES, BodyReader, num_values
from pdserve.gateway.http.docs import DOCUMENT, LINES, AnswerModel, described
from pdserve.gateway.http.fields import (
    FIELD_ALIASES,
    IGNORED_FIELDS,
    NON_GENERATION_FIELDS,
    OMITTED_FIELDS,
    PROMPT_FIELDS,
    REFUSED_FIELDS,
    REQUEST_FIELDS,
    refused_field,
)
from pdserve.gateway.http.guard import API_KEY, SESSION_ID, caller_of, is_loopback
from pdserve.gateway.http.held_responses import MAX_HELD_BYTES
from pdserve.gateway.http.inner import post
from pdserve.gateway.http.json_text import (
    AT_ONCE,
    JsonList,
    JsonPieces,
    array_json,
    list_json,
    object_json,
)
from pdserve.gateway.http.members import (
    ACCEPTED_TYPE,
    DROPPED_TYPE,
    OMITTED_TYPE,
    REFUSED_TYPE,
    SERVED_TYPE,
    EntryType,
    EntryTypes,
    Handling,
    kept_as_text,
    log_unsupported,
)
from pdserve.gateway.http.multipart import FILE, FileForm
from pdserve.gateway.http.responses import DirectWrite, EventStream, PieceStream, Reply
from pdserve.gateway.http.thinking import (
    Effort,
    ReasoningBody,
    ThinkingBody,
    ThinkingChoice,
    ThinkingFields,
    thinking_budget,
    thinking_variables,
)
from pdserve.gateway.http.validation import (
    MAX_TOOLS,
    NEUTRAL_VALUES,
    ArgumentSchema,
    ModelName,
    Priority,
    StrictModel,
    TextOrObjects,
    TokenLimit,
    ToolDescription,
    ToolName,
    check_num_fields,
    check_served,
    check_tools,
    parse_body,
    parse_fields,
    parsed,
)
