"""The HTTP shell that carries every API: server, bounds, errors, streams, documentation."""

from pdserve.gateway.http.api import (
    AT_ONCE,
    CodedError,
    ErrorFormat,
    Event,
    HttpApi,
    HttpError,
    HttpLimits,
    JsonList,
    JsonPieces,
    api_of,
    array_json,
    error_response,
    json_event,
    list_json,
    object_json,
    sent_event,
)
from pdserve.gateway.http.app import create_app, create_routes, post
from pdserve.gateway.http.body import (
    FILE,
    MAX_VALUES,
    VALUE_BYTES,
    BodyReader,
    FileForm,
    num_values,
)
from pdserve.gateway.http.docs import DOCUMENT, LINES, ResponseModel, describe
from pdserve.gateway.http.fields import (
    ACCEPTED_TYPE,
    DROPPED_TYPE,
    FIELD_ALIASES,
    IGNORED_FIELDS,
    NEUTRAL_VALUES,
    NON_GENERATION_FIELDS,
    OMITTED_FIELDS,
    OMITTED_TYPE,
    PROMPT_FIELDS,
    REFUSED_FIELDS,
    REFUSED_TYPE,
    REQUEST_FIELDS,
    SERVED_FIELDS,
    SERVED_TYPE,
    EntryType,
    EntryTypes,
    Handling,
    kept_as_text,
    log_unsupported,
)
from pdserve.gateway.http.guard import API_KEY, SESSION_ID, caller_of, is_loopback
from pdserve.gateway.http.responses import (
    MAX_HELD_BYTES,
    DirectWrite,
    EventStream,
    PieceStream,
    Reply,
)
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
    ArgumentSchema,
    ModelName,
    Priority,
    StrictModel,
    TextOrObjects,
    TokenLimit,
    ToolDescription,
    ToolName,
    check_served,
    check_tools,
    parse_body,
    parsed,
)
