"""Sixty conversations in many chat templates, through three APIs: the gateway renders every chat
that transformers renders, with the same text unless transformers omits something. Equivalent bodies
of the other APIs render the same chat, and calls of each family are accepted back as history.

Requests are HTTP requests, so the comparison covers the work of a template process.
"""

import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
from builders.api_bodies import APIS, CHAT, Api
from builders.conversations import LOOK_UP, WEATHER, Conversation, conversations
from builders.packaged_tokenizers import NotFetched, template_of_many, templates_of_many
from builders.shipped_tokenizer import shipped_library
from builders.tool_answers import TOOL_ANSWERS
from fakes.in_process_text import InProcessPool
from fakes.template_model import TemplateModel
from fakes.tool_model import TEMPLATE
from oracles.llama_cpp_templates import llama_cpp_templates
from transformers import PreTrainedTokenizerFast

from pdserve.text import ParserChoice
from pdserve.text.reasoning import reasoning_family
from pdserve.text.tokenizer import TextModelInfo
from pdserve.text.tokenizer.tokenizer import Rendered, Tokenizer
from pdserve.text.tool_parsers import GENERIC_PARSER, tool_parser_names
from pdserve.text.workers import LoadedTokenizer

pytestmark = pytest.mark.anyio
TEXT_TESTS = Path(__file__).parents[1] / "text"
CONVERSATIONS = tuple(conversations())
TOOLS = (WEATHER, LOOK_UP)
AS_DATA = ("'type': 'text'", '"type": "text"', "None")  # lists, and contents that are not text
UNKNOWN = "<unk>"  # written by a tokenizer without bytes for unknown characters
OWN = {path.stem: path.read_text() for path in TEXT_TESTS.glob("*.jinja")} | {
    # Fails on null contents, on tools without a description, on later system turns, and on plain
    # text.
    "strict": """
{%- if tools %}{{- '<tools>' }}{%- for t in tools %}
{{- t.function.name + ': ' + t.function.description + (t.function.parameters | tojson) }}
{%- endfor %}{{- '</tools>' }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{- raise_exception('system first') }}{%- endif %}
{%- if m.role not in ('system', 'user', 'assistant', 'tool') %}
{{- raise_exception('no such role') }}{%- endif %}
{{- '<|im_start|>' + m.role + '\\n' }}{%- if '<think>' in m.content %}{{- 'thought' }}{%- endif %}
{{- m.content + (m.thinking or '') }}{%- for c in m.tool_calls or [] %}
{{- c.function.name }}{%- for k, v in c.function.arguments | items %}{{- k ~ '=' ~ v }}{%- endfor %}
{%- endfor %}{{- '<|im_end|>\\n' }}
{%- endfor %}""",
    # Roles alternate except for results; arguments are text, and a turn with calls has no content.
    "alternating": """
{%- set ns = namespace(n=0, system='') %}
{%- if tools %}{{- '[TOOLS]' + (tools | tojson) }}{%- endif %}
{%- if messages[0].role == 'system' %}{%- set ns.system = messages[0].content + '\\n' %}
{%- set messages = messages[1:] %}{%- endif %}
{%- for m in messages %}
{%- if m.role in ('user', 'assistant') and not m.tool_calls %}
{%- if (m.role == 'user') != (ns.n % 2 == 0) %}{{- raise_exception('alternate') }}{%- endif %}
{%- set ns.n = ns.n + 1 %}{%- endif %}
{%- if m.role == 'user' %}{{- '[INST] ' + ns.system + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}{{- '[RESULT]' + m.content }}
{%- elif m.role == 'assistant' and m.content is none %}{%- for c in m.tool_calls %}
{{- '[CALL]' + c.function.name + c.function.arguments }}{%- endfor %}
{%- elif m.role == 'assistant' %}{{- m.content + '</s>' }}
{%- else %}{{- raise_exception('role') }}{%- endif %}{%- endfor %}""",
    # Contents are lists; an unknown role is left out.
    "lists": """
{%- for m in messages if m.role in ('system', 'user', 'assistant', 'tool') %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- for part in m.content %}{{- part.text }}{%- endfor %}
{%- for c in m.tool_calls or [] %}{{- c.function | tojson }}{%- endfor %}{{- '<|im_end|>' }}
{%- endfor %}{%- if tools %}{{- tools | map(attribute='function') | map('tojson') | join }}
{%- endif %}""",
}


def documented(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message in the documented form of transformers: the arguments of calls are objects."""
    made = json.loads(json.dumps(message))
    for call in made.get("tool_calls", ()):
        try:
            value = json.loads(call["function"]["arguments"], parse_constant=lambda name: 1 / 0)
        except (ValueError, ZeroDivisionError):
            continue
        if isinstance(value, dict):
            call["function"]["arguments"] = value
    return made


def as_system(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "role": "system"} if message["role"] == "developer" else message


def joined(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with a developer message merged into the system turn before it."""
    if [message["role"] for message in messages[:2]] != ["system", "developer"]:
        return messages
    system, developer, *others = messages
    content = f"{system['content']}\n\n{developer['content']}"
    return [{**system, "content": content}, *others]


def references(library: Any, source: str, given: Conversation) -> Iterator[str]:
    """The renderings of transformers: with arguments as objects and as text, and with developer
    messages unchanged, as system messages, or merged into the system turn before them."""
    wire = [dict(message) for message in given.messages]
    for messages in ([documented(message) for message in wire], wire):
        for chat in (messages, [as_system(message) for message in messages], joined(messages)):
            try:
                yield library.apply_chat_template(
                    chat,
                    tools=list(given.tools) if given.tools else None,
                    chat_template=source,
                    add_generation_prompt=True,
                    tokenize=False,
                )
            except Exception:
                continue


def shown(text: str, given: Conversation) -> int:
    return sum(word in text for word in given.words)


class OnePool(InProcessPool):
    """A pool that keeps the text it loaded last."""

    loaded: LoadedTokenizer

    async def load(self, model_info: TextModelInfo, files: Mapping[str, bytes]) -> LoadedTokenizer:
        self.loaded = await super().load(model_info, files)
        return self.loaded


class ServedTemplate:
    """A chat template behind the three APIs, and its rendering by transformers."""

    def __init__(
        self, source: str, library: Any, model: TemplateModel, pool: OnePool, http: Any
    ) -> None:
        self.source = source
        self.library = library
        self._model = model
        self._pool = pool
        self._http = http
        self.body: dict[str, Any] = {}  # the last body of a loop
        self.refusal = ""

    @property
    def loaded(self) -> LoadedTokenizer:
        return self._pool.loaded

    @property
    def rendered(self) -> Rendered:
        """The last prompt."""
        rendered: Rendered = self.loaded.workers.rendered  # type: ignore[attr-defined]
        return rendered

    async def prompt(self, api: Api, given: Conversation) -> Rendered | None:
        """The prompt of a conversation, or None if it is refused."""
        self._model.says = str
        answer = await self._post(api, api.body(given))
        return None if answer is None else self.rendered

    async def answer(self, api: Api, turns: list[Any], says: str) -> dict[str, Any] | None:
        """The answer to the turns with this text, after a thought if the model thinks; None if
        refused."""
        self._model.says = lambda: self._thought() + says
        self.body = api.request(turns, api.tools(TOOLS))
        return await self._post(api, self.body)

    async def _post(self, api: Api, body: dict[str, Any]) -> dict[str, Any] | None:
        answer = await self._http.post(api.path, json=body)
        self.refusal = answer.text
        if answer.status_code == 400:
            return None
        assert answer.status_code == 200, answer.text
        made: dict[str, Any] = answer.json()
        return made

    def _thought(self) -> str:
        family = reasoning_family(self.loaded.reasoning_parser)
        prompt = self.rendered.text.rstrip()
        if family is None or prompt.endswith(family.end):
            return ""
        begin, end = family.written or (family.begin, family.end)
        if prompt.endswith(begin):
            begin = ""
        return f"{begin}so{end}" + "<|start|>assistant" * (family.name == "gpt_oss")


Serve = Callable[..., Any]
# Parsers without a llama.cpp template that renders tools.
OTHERS = {
    "deepseek_v3", "deepseek_v31", "functiongemma", "internlm2", "json", "llama4_pythonic",
    "olmo3", "pythonic", "step3",
}  # fmt: skip


@pytest.fixture(scope="module")
def library() -> Any:
    return shipped_library()


@pytest.fixture
def serve_template(make_app: Callable[..., Any]) -> Serve:
    @asynccontextmanager
    async def serve(
        source: str, library: Any, bos: str, eos: str, parser: str = "auto"
    ) -> AsyncIterator[ServedTemplate]:
        file = library.backend_tokenizer.to_str().encode()
        model, pool = TemplateModel(file, source, [eos], bos), OnePool()
        app = make_app(model, text_pool=pool, parsers=ParserChoice(parser))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
            yield ServedTemplate(source, library, model, pool, http)

    return serve


async def checked(served: ServedTemplate, given: Conversation) -> tuple[str, Rendered | None]:
    """The outcome of a conversation as a chat, and its prompt."""
    texts = list(references(served.library, served.source, given))
    rendered = await served.prompt(CHAT, given)
    if rendered is None:
        assert not texts, served.refusal
        return "refused by both", None
    tokenizer = served.loaded.vocabulary
    assert isinstance(tokenizer, Tokenizer)
    ids = tokenizer.encode_rendered(rendered)
    named = [tokenizer.token_name(i) for i in ids if i in tokenizer.special.ids]
    named = [name for name in named if name != UNKNOWN]
    parts = tokenizer.special.split(rendered.text)
    written = [tokenizer.token_name(part) for part in parts if isinstance(part, int)]
    assert named == written  # no special token of the template is lost
    whole = [
        text
        for text in texts
        if shown(text, given) == len(given.words)
        and not any(bad in text for bad in AS_DATA)
        and ("thinks" in text or "thinks" not in rendered.text)
    ]
    if whole:
        assert rendered.text in whole
        return "equal", rendered
    assert shown(rendered.text, given) >= max((shown(text, given) for text in texts), default=0)
    if rendered.text in texts:
        return "equal, not whole", rendered
    return "more than transformers'" if texts else "refused by transformers alone", rendered


async def checked_as(
    api: Api, served: ServedTemplate, given: Conversation, chat: Rendered | None
) -> str:
    """The outcome in an API other than chat, for a conversation that rendered to `chat`."""
    same = api.same(given)
    expected = chat if same == given else await served.prompt(CHAT, same)
    rendered = await served.prompt(api, given)
    if expected is None:
        return f"{api.name} refused" if rendered is None else f"{api.name} shown alone"
    assert rendered is not None, served.refusal
    assert rendered.text == expected.text
    return f"{api.name} equal"


async def check(
    served: ServedTemplate,
    name: str,
    subtests: pytest.Subtests,
    conversations: Sequence[Conversation] = CONVERSATIONS,
) -> Counter[str]:
    ends: Counter[str] = Counter()
    for given in conversations:
        chat = None
        with subtests.test(template=name, conversation=given.name):
            end, chat = await checked(served, given)
            ends[end] += 1
            ends["conversations"] += 1
        for api in APIS[1:]:
            with subtests.test(template=name, conversation=given.name, api=api.name):
                ends[await checked_as(api, served, given, chat)] += 1
    return ends


async def check_loop(served: ServedTemplate, api: Api, parser: str) -> list[str] | None:
    """The prompts of a loop of three turns (a call, another call, an answer) and of the next user
    turn. None if the first turn is refused, or the call in the second."""
    turns: list[Any] = [api.user("asks w101")]
    words = ["w101"]
    prompts = []
    ids: list[str] = []

    def keep_prompt() -> None:
        text = served.rendered.text
        assert [word for word in words if word not in text] == []
        for number, name in enumerate(ids):  # which are random in each answer
            text = text.replace(name, f"call {number}")
        prompts.append(text)

    call = TOOL_ANSWERS[parser].call
    for city, result in (("Paris", "w102"), ("Rome", "w103")):
        answer = await served.answer(api, turns, call.replace("Paris", city))
        if answer is None:
            return None
        keep_prompt()
        (made,) = api.calls(answer)
        assert (made.name, made.arguments) == ("get_weather", {"city": city})
        ids.append(made.id)
        turns += [*api.history(answer), api.result(made, f"result {result}")]
        words += [city, result]
        call = call.replace(":0", ":1")
    final = "<|channel|>final<|message|>" * (parser == "gpt_oss") + "Rain w104."
    answer = await served.answer(api, turns, final)
    assert answer is not None, served.refusal
    keep_prompt()
    assert api.calls(answer) == []
    assert api.text(answer).strip() == "Rain w104."
    turns += [*api.history(answer), api.user("thanks w105")]
    words += ["w104", "w105"]
    assert await served.answer(api, turns, final) is not None, served.refusal
    keep_prompt()
    return prompts


async def check_loops(
    served: ServedTemplate, name: str, subtests: pytest.Subtests, parser: str = ""
) -> Counter[str]:
    """Run loops through every API and compare their prompts with those of chat."""
    ends: Counter[str] = Counter()
    parser = parser or served.loaded.tool_parser or GENERIC_PARSER
    expected: list[str] | None = None
    for api in APIS:
        with subtests.test(template=name, loop=api.name):
            prompts = await check_loop(served, api, parser)
            if prompts is None and api is CHAT:
                tools = tuple(CHAT.tools(TOOLS))
                refused = Conversation(name, tuple(served.body["messages"]), tools, ())
                assert not list(references(served.library, served.source, refused))
            expected = prompts if api is CHAT else expected
            assert prompts == expected, served.refusal
            ends["loops"] += 1
            ends["refused loops" if prompts is None else f"loops of {parser}"] += 1
    return ends


def check_counts(ends: Counter[str], num_templates: int) -> None:
    """Check that every conversation was compared in every API, and that nearly every template ran
    the loops."""
    assert ends["conversations"] == num_templates * len(CONVERSATIONS)
    for api in APIS[1:]:
        compared = sum(ends[f"{api.name} {end}"] for end in ("equal", "refused", "shown alone"))
        assert compared == ends["conversations"]
        assert ends[f"{api.name} equal"] > ends["conversations"] * 9 // 10
    assert ends["loops"] == num_templates * len(APIS)
    assert ends["refused loops"] <= ends["loops"] // 20


def test_there_are_sixty_conversations() -> None:
    assert len({given.name for given in CONVERSATIONS}) == 60


async def test_some_conversations_and_a_loop(
    serve_template: Serve, library: Any, subtests: pytest.Subtests
) -> None:
    ends: Counter[str] = Counter()
    for name in ("chatml", "lists"):
        async with serve_template(OWN[name], library, "<s>", "</s>") as served:
            ends += await check(served, name, subtests, CONVERSATIONS[::5])
            ends += await check_loops(served, name, subtests)
    assert ends["conversations"] == 24
    assert ends["responses equal"] > 15
    assert ends["messages equal"] > 15
    assert ends["equal"] > 3
    assert ends["loops of json"] == ends["loops of generic"] == len(APIS)


@pytest.mark.extended
async def test_templates_of_each_kind(
    serve_template: Serve, library: Any, subtests: pytest.Subtests
) -> None:
    ends: Counter[str] = Counter()
    for name, source in OWN.items():
        async with serve_template(source, library, "<s>", "</s>") as served:
            ends += await check(served, name, subtests)
    assert ends["equal"] > 90
    assert ends["responses equal"] > 380
    assert ends["messages equal"] > 380
    assert ends["refused by transformers alone"] > 50
    assert ends["more than transformers'"] > 10


@pytest.mark.extended
@pytest.mark.timeout(1200)
async def test_templates_of_llama_cpp(
    serve_template: Serve, library: Any, subtests: pytest.Subtests
) -> None:
    templates = llama_cpp_templates()
    assert len(templates) >= 70
    ends: Counter[str] = Counter()
    for name, source in templates.items():
        async with serve_template(source, library, "<s>", "</s>") as served:
            ends += await check(served, name, subtests)
            ends += await check_loops(served, name, subtests)
    check_counts(ends, len(templates))
    assert ends["equal"] > 2000
    assert {name for name in ends if name.startswith("loops of")} >= {
        f"loops of {name}" for name in set(tool_parser_names()) - OTHERS
    }


@pytest.mark.extended
@pytest.mark.timeout(1200)
async def test_templates_of_real_tokenizers(
    serve_template: Serve, subtests: pytest.Subtests
) -> None:
    try:
        names = templates_of_many()
    except NotFetched as error:
        pytest.skip(f"TEMPLATES OF REAL TOKENIZERS WERE NOT TESTED: {error}")
    ends: Counter[str] = Counter()
    for name in names:
        packaged = template_of_many(name)
        words = tokenizers.Tokenizer.from_buffer(packaged.tokenizer)
        tokens = {"bos_token": packaged.bos or None, "eos_token": packaged.eos}
        library = PreTrainedTokenizerFast(tokenizer_object=words, **tokens)
        async with serve_template(packaged.template, library, packaged.bos, packaged.eos) as served:
            ends += await check(served, name, subtests)
            ends += await check_loops(served, name, subtests)
    assert len(names) >= 7
    check_counts(ends, len(names))
    assert ends["equal"] > 400


@pytest.mark.extended
@pytest.mark.timeout(1200)
async def test_tool_loops_of_each_parser(
    serve_template: Serve, library: Any, subtests: pytest.Subtests
) -> None:
    ends: Counter[str] = Counter()
    for parser in tool_parser_names():
        async with serve_template(TEMPLATE, library, "<s>", "</s>", parser) as served:
            ends += await check_loops(served, parser, subtests, parser)
    assert all(ends[f"loops of {parser}"] == len(APIS) for parser in tool_parser_names())
