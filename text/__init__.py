"""From messages to token ids and back, for gateway, picker and Python API: chat templates,
tokenizers, grammars from JSON schemas, and parsers of reasoning and tool calls."""

from pdserve.text.answer_format import AUTO, AnswerFormat, ParserChoice
from pdserve.text.choice import Choice, Delta, LogprobEntry, ScoredToken, only_text, scored
from pdserve.text.constraints import Constraints, check_structure, constraints_of, texts_of
from pdserve.text.errors import (
    CHARS_PER_TOKEN,
    ContextExceeded,
    TextError,
    TooLong,
    UnsupportedTokenizer,
    least_tokens,
)
from pdserve.text.messages import (
    EFFORTS,
    REASONING,
    THINKING_SWITCHES,
    VERBOSITIES,
    TemplateInput,
    suggested_variables,
    thinking_switches,
)
from pdserve.text.parts import (
    ContentPart,
    ReasoningPart,
    TextPart,
    ToolCallPart,
    arguments_object,
    calls_of,
    reasoning_of,
    text_of,
)
from pdserve.text.preparation import ClientRequest, Preparation
from pdserve.text.request import (
    ChatCompletionRequest,
    Kind,
    RequestedSampling,
    Structure,
    TextCompletionRequest,
    Tool,
    ToolUse,
    make_tool_use,
)
from pdserve.text.sampling import ID_LISTS, check_sampling, context_overflow, seed_of
