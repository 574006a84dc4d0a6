"""A scripted model for agents: it reasons, calls the tools that a prompt offers, and answers from
their results. Its output is a function of the prompt alone.

A user's text directs it by words in double square brackets; the newest directive counts, until an
answer without a call has been given:

- `[[list FOLDER]]` calls a tool that lists files or runs a shell command
- `[[read FILE]]` calls a shell tool that shows a file
- `[[write FILE]]` calls a tool that writes LONG_TEXT to a file
- `[[call NAME JSON]]` calls a tool by its name with these arguments
- `[[recall]]` reports which turn this is, and what the prompt has of earlier ones
- `[[say TEXT]]` answers with the text
"""

import asyncio
import hashlib
import json
import re
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import tokenizers
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from fakes.router import Event, FakeRouter, finished, placed, served, tokens
from pdserve.protos import common_pb2 as pb

NAME = "agent"
TEMPLATE = """
{%- if tools %}<|im_start|>tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'system' and not loop.first %}
{{- raise_exception('the system message is the first one') }}
{%- endif %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # added tokens that are not special
LONG_TEXT = "".join(f"{row:3}. The tide comes in, and the boats rise.\n" for row in range(1, 58))
THOUGHT = "I look at what was said before I answer."
DIRECTIVE = re.compile(r"\[\[(list|read|write|call|recall|say)\s*(.*?)\]\]", re.DOTALL)
LISTING = ("list_files", "ls", "list", "bash", "exec_command", "shell_command", "shell", "read")
READING = ("bash", "exec_command", "shell_command", "shell")
WRITING = ("write_file", "write", *READING)
TOOLS = {"list": LISTING, "read": READING, "write": WRITING}
PROSE = Path(__file__).parents[3] / "benchmarks/text/prose.txt"


@cache
def tokenizer_json() -> bytes:
    """Return a byte-level tokenizer with about 3 characters of English per token."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
    )
    tokenizer.train_from_iterator([PROSE.read_text()], trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer.to_str().encode()


@dataclass(frozen=True)
class Message:
    role: str
    text: str


@dataclass(frozen=True)
class Prompt:
    """The parts of a request that TEMPLATE has rendered."""

    tools: tuple[dict[str, Any], ...]  # functions: name, description, parameters
    messages: tuple[Message, ...]
    thinks: bool  # the answer begins outside of its reasoning

    @classmethod
    def parse(cls, parts: Sequence[str]) -> "Prompt":
        """Parse a prompt. `parts`: the text of each turn, its role in the first line; the last one
        is unfinished.
        """
        functions: list[dict[str, Any]] = []
        messages = []
        for part in parts[:-1]:
            role, _, text = part.partition("\n")
            if role == "tools":
                functions += [json.loads(line)["function"] for line in text.splitlines()]
            else:
                messages.append(Message(role, text))
        return cls(tuple(functions), tuple(messages), "</think>" not in parts[-1])

    @property
    def directive(self) -> tuple[str, str, int]:
        """Return the newest directive's verb and words, and the number of tool results since;
        nothing where a summary of the conversation is the last request.
        """
        last = self.messages[-1] if self.messages else Message("", "")
        if last.role == "user" and "summary" in DIRECTIVE.split(last.text)[-1]:
            return "", "", 0
        for at in range(len(self.messages) - 1, -1, -1):
            message = self.messages[at]
            later = self.messages[at + 1 :]
            if message.role == "user" and (all_found := DIRECTIVE.findall(message.text)):
                verb, words = all_found[-1]
                return verb, words, sum(one.role == "tool" for one in later)
            if message.role == "assistant" and "<tool_call>" not in message.text:
                break
        return "", "", 0

    def tool(self, names: Sequence[str]) -> dict[str, Any] | None:
        """Return the offered tool with the first matching name, ignoring case."""
        by_name = {str(tool["name"]).lower(): tool for tool in reversed(self.tools)}
        return next((by_name[name] for name in names if name in by_name), None)


def answer(prompt: Prompt, grammar: str = "") -> str:
    """Return the model's answer after its reasoning; where the whole answer is JSON of a schema, a
    value of it.
    """
    verb, words, num_results = prompt.directive
    call = None
    if num_results == 0 and verb == "call":
        name, _, arguments = words.partition(" ")
        call = _call(name, json.loads(arguments))
    elif num_results == 0 and verb in TOOLS:
        tool = prompt.tool(TOOLS[verb])
        if tool is not None:
            call = _call(tool["name"], _arguments(tool, verb, words))
    if call is None and (schema := _schema(grammar)) is not None:
        return words if verb == "say" else json.dumps(_value(schema))
    return call or _text(prompt, verb, words)


def _call(name: str, arguments: dict[str, Any]) -> str:
    fields = f'{{"name": {json.dumps(name)}, "arguments": {json.dumps(arguments)}}}'
    return f"<tool_call>\n{fields}\n</tool_call>"


def _text(prompt: Prompt, verb: str, words: str) -> str:
    if verb == "say":
        return words
    if verb == "recall":
        roles = [message.role for message in prompt.messages]
        num_turns = sum(
            message.role == "user" and DIRECTIVE.search(message.text) is not None
            for message in prompt.messages
        )
        num_thoughts = sum("<think>" in message.text for message in prompt.messages)
        return (
            f"This is turn {num_turns} with {roles.count('tool')} results of tools"
            f" and {num_thoughts} thoughts."
        )
    if verb:
        results = [message.text for message in prompt.messages if message.role == "tool"]
        shown = " ".join(results[-1].split())[:300] if results else "nothing"
        return f"The tool has answered: {shown}. That is all."
    return "<summary>\nFiles were listed and a file was written.\n</summary>"


def _schema(grammar: str) -> dict[str, Any] | None:
    """Return the schema of the whole answer, None if it has another grammar."""
    return json.loads(grammar)["grammars"][0].get("json_schema") if grammar else None


def _arguments(tool: dict[str, Any], verb: str, place: str) -> dict[str, Any]:
    """Return the arguments that the tool's schema requires, and those that name a path or
    contents.
    """
    commands = {
        "list": f"ls {place}",
        "read": f"cat {place}",
        "write": f"cat > {place} <<'END'\n{LONG_TEXT}END",
    }
    command = commands[verb]
    known = {
        "command": command,
        "cmd": command,
        "content": LONG_TEXT,
        "description": "Look at the files",
    }
    schema = tool.get("parameters") or {}
    arguments = {}
    for name, of_name in schema.get("properties", {}).items():
        is_place = re.fullmatch(r"(file|folder|dir)?_?(path|name|folder)?", name.lower())
        if name not in schema.get("required", ()) and not is_place:
            continue
        if of_name.get("type") == "array" and name in known:
            arguments[name] = ["bash", "-c", known[name]]
        else:
            arguments[name] = known.get(name, place if is_place else _value(of_name))
    return arguments


def _value(schema: dict[str, Any]) -> Any:
    """Return a value of a simple schema."""
    if "enum" in schema:
        return schema["enum"][0]
    if "const" in schema:
        return schema["const"]
    kind = schema.get("type", "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        properties = schema.get("properties", {})
        return {name: _value(properties[name]) for name in schema.get("required", properties)}
    simple = {"array": [], "integer": 1, "number": 1, "boolean": False, "null": None}
    return simple.get(kind, "harbour")


class AgentModel(FakeRouter):
    """Serves one model that generates a token every `token_s` seconds. `notes` gets a line of JSON
    for each request: its prompt, its limit of tokens, and the answer.
    """

    def __init__(self, notes: Path, context_len: int, token_s: float) -> None:
        card, blobs = served(NAME, context_len, template=TEMPLATE)
        data = tokenizer_json()
        words = tokenizers.Tokenizer.from_buffer(data)
        card.tokenizer_digest = hashlib.sha256(data).hexdigest()
        card.vocab_size = words.get_vocab_size()
        card.eos_ids[:] = [words.token_to_id("<|im_end|>")]
        blobs[card.tokenizer_digest] = data
        super().__init__(self._say, [card], blobs)
        self.words = words
        self._masks = LLTokenizer(data.decode(), eos_token=self.eos)
        self._notes = notes
        self._token_s = token_s

    async def _say(self, router: FakeRouter, start: pb.Start) -> AsyncGenerator[Event, None]:
        yield placed(start)
        text = self._answer(start)
        room = self.cards[0].context_len - len(start.prompt_ids)
        num_tokens = start.params.max_tokens or room
        ids = [*self.encode(text), self.eos][:num_tokens]
        with self._notes.open("a") as file:
            prompt = self.words.decode(list(start.prompt_ids), skip_special_tokens=False)
            note = {"prompt": prompt, "max_tokens": num_tokens, "answer": text}
            file.write(json.dumps(note) + "\n")
        begun = time.monotonic()
        for position, token in enumerate(ids):
            ended = pb.STOP if token == self.eos else pb.LENGTH
            finish = ended if position + 1 == len(ids) else pb.FINISH_REASON_UNSPECIFIED
            await asyncio.sleep(begun + (position + 1) * self._token_s - time.monotonic())
            yield tokens(start, [token], position, 0, finish)
        yield finished(start)

    def _answer(self, start: pb.Start) -> str:
        """Answer with reasoning, unless the template has closed it or the grammar does not allow
        it.
        """
        prompt, grammar = self._prompt(start), start.params.grammar
        text = answer(prompt, grammar.source)
        thinking = f"<think>\n{THOUGHT}\n</think>\n\n{text}"
        if not grammar.source:
            return thinking if prompt.thinks else text
        if grammar.begins_after:
            return thinking if prompt.thinks and self._accepts(grammar.source, text) else text
        matches = [one for one in (thinking, text) if self._accepts(grammar.source, one)]
        assert matches, f"{text!r} does not match {grammar.source}"
        return matches[0] if prompt.thinks else text

    def _accepts(self, grammar: str, text: str) -> bool:
        ids = [*self.encode(text), self.eos]
        return LLMatcher(self._masks, grammar).try_consume_tokens(ids) == len(ids)

    def _prompt(self, start: pb.Start) -> Prompt:
        begin = self.words.token_to_id("<|im_start|>")
        parts: list[list[int]] = []
        for token in start.prompt_ids:
            if token == begin:
                parts.append([])
            elif token != self.eos and parts:
                parts[-1].append(token)
        return Prompt.parse(
            [self.words.decode(part, skip_special_tokens=False).strip("\n") for part in parts]
        )
