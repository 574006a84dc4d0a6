"""A router whose model generates a text in each round, and a chat template that shows tools."""

import asyncio
import hashlib
from collections.abc import AsyncGenerator

from fakes.router import Event, FakeRouter, finished, placed, served, tokens
from pdserve.protos import common_pb2 as pb

CONTEXT_LEN = 4096
TEMPLATE = """
{%- if tools %}tools:{% for t in tools %} {{ t.function.name }}{% endfor %}
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}
{%- if m.tool_call_id %} [{{ m.tool_call_id | length }}]{% endif %}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
THINKING = (
    "{% for m in messages if m.reasoning_content %}thought: {{ m.reasoning_content }}{% endfor %}"
    + TEMPLATE
    + "{# <think></think> #}"
)


def calls(name: str, arguments: str = "{}") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


class ToolModel(FakeRouter):
    """A model that generates one text per round (the last one again in further ones), token by
    token.
    """

    def __init__(self, *texts: str, template: str = TEMPLATE) -> None:
        card, blobs = served(context_len=CONTEXT_LEN)
        card.template_digest = hashlib.sha256(template.encode()).hexdigest()
        blobs[card.template_digest] = template.encode()
        super().__init__(self._say, [card], blobs)
        self._texts = texts

    async def _say(self, router: FakeRouter, start: pb.Start) -> AsyncGenerator[Event, None]:
        yield placed(start)
        text = self._texts[min(len(self.starts), len(self._texts)) - 1]
        ids = [*self.encode(text), self.eos][: start.params.max_tokens or None]
        for position, token in enumerate(ids):
            ended = pb.STOP if token == self.eos else pb.LENGTH
            finish = ended if position + 1 == len(ids) else pb.FINISH_REASON_UNSPECIFIED
            for choice in range(start.params.n):
                yield tokens(start, [token], position, choice, finish)
            await asyncio.sleep(0)
        yield finished(start, cached_tokens=1)

    def prompt(self, number: int) -> str:
        return str(
            self.words.decode(list(self.starts[number].prompt_ids), skip_special_tokens=False)
        )

    @property
    def num_generated(self) -> int:
        return sum(len(self.encode(text)) + 1 for text in self._texts)
