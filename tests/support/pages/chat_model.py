"""A model for tests of the pages: its answer depends on the last message."""

import asyncio
import hashlib
from collections.abc import AsyncGenerator

from fakes.router import Event, FakeRouter, finished, placed, served, tokens
from fakes.tool_model import THINKING, calls

from pdserve.protos import common_pb2 as pb

CONTEXT_LEN = 8192
GENERATION: dict[str, object] = {"temperature": 0.25}
LONG_WORDS = 6000  # half a minute, so that a stop always comes in time
SAMPLE = """# A heading
Some **bold** text, `code` and a [link](https://example.org/).

| a | b |
|---|---|
| 1 | 2 |

```python
print("hello")
```
"""
WRITTEN = r"""
3. third
4. fourth

| left | middle | right |
|:-----|:------:|------:|
| 1    | 2      | 3     |

```python
def twice(number):  # of any kind
    return 2 * number
```

```nosuchlanguage
plain
```

It costs $5 or $6. A formula: $E = mc^2$, \(\{a\}\) or

$$
\frac{1}{2}
- \sqrt{x}
$$

\[ \color{red}{\begin{pmatrix} a & b \\ c & d \end{pmatrix}} \]

No TeX: $\nosuchcommand$
"""
HOSTILE = """<script>window.hacked = 1</script>

<img src=x onerror="window.hacked = 2">

<a href="javascript:window.hacked=3" id="current">raw link</a>

[markdown link](javascript:window.hacked=4) [data](data:text/html,<script>window.hacked=5</script>)

![picture](https://tracker.invalid/p.png "t") ![x](x" onerror="window.hacked=6)

<svg onload="window.hacked=7"><use href="data:image/svg+xml,x"/></svg>

<iframe srcdoc="<script>parent.hacked=8</script>"></iframe>

<form action="https://evil.invalid"><input name="a"><button>send</button></form>

<style>body { display: none }</style>

<details open ontoggle="window.hacked=9"></details>

```"><img src=x onerror=window.hacked=10>
code
```

<p style="position:fixed">the end</p>

<math><mtext><style><img src onerror=window.hacked=11></style>
"""


class ChatModel(FakeRouter):
    """Answers SAMPLE to "sample", HOSTILE to "hostile", reasons at "think", calls a tool at
    "tool", continues until it is stopped at "long", and repeats everything else. A second model,
    "base", has no chat template and repeats its whole prompt.
    """

    def __init__(self) -> None:
        card, blobs = served(context_len=CONTEXT_LEN, generation=GENERATION)
        card.template_digest = hashlib.sha256(THINKING.encode()).hexdigest()
        blobs[card.template_digest] = THINKING.encode()
        base, its_blobs = served("base", CONTEXT_LEN)
        base.template_digest = ""
        blobs |= its_blobs
        super().__init__(self._say, [card, base], blobs)

    async def _say(self, router: FakeRouter, start: pb.Start) -> AsyncGenerator[Event, None]:
        prompt = str(self.words.decode(list(start.prompt_ids), skip_special_tokens=False))
        if start.model == "base":
            last, otherwise = "", f" and {prompt}"
        else:
            role, _, turn = prompt.split("<|im_start|>")[-2].partition("\n")
            last = turn.partition("<|im_end|>")[0].strip()
            otherwise = f"{role} said {last}"
        text = {
            "sample": SAMPLE,
            "hostile": HOSTILE,
            "think": "<think>\nLet me see.\n</think>\nSeen.",
            "tool": calls("weather", '{"city": "Rome"}'),
            "long": "word " * LONG_WORDS,
        }.get(last, otherwise)
        yield placed(start)
        whole = [*self.encode(text), self.eos]
        ids = whole[: start.params.max_tokens or None]
        for position, token in enumerate(ids):
            ended = pb.STOP if token == self.eos else pb.LENGTH
            finish = ended if position + 1 == len(ids) else pb.FINISH_REASON_UNSPECIFIED
            yield tokens(start, [token], position, 0, finish)
            await asyncio.sleep(0.005 if last == "long" else 0)
        yield finished(start, cached_tokens=1)
