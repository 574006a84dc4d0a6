"""A chat template, rendered in a process under the limits of a tokenizer worker: only there may it
hang, exhaust memory or crash.
"""

from pathlib import Path
from random import Random

from builders.hostile_templates import ForkedWorker
from fakes.router import TEMPLATE

from fuzz.mutate import mutate
from pdserve.text.workers import WorkerLimits

LIMITS = WorkerLimits(
    load_s=5,
    load_bytes=64 << 20,
    render_s=0.05,
    prompt_s=0.2,
    prompt_bytes=64 << 20,
    late_s=2.0,
    grammar_s=0.2,
)
# Constructs that have broken sandboxes: growth, recursion, formats, deep values, C code that holds
# the GIL.
PARTS = [
    "{{ '%%(a)%ds' % {'a': 1} }}",
    "{% set ns = namespace(a=[], b=[]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}"
    "{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.a == ns.b }}",
    "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "{{ messages | tojson(indent=%d) }}",
    "{{ (messages | string) * %d }}",
    "{{ range(%d) | list | length }}",
    "{{ 'a' | center(%d) }}",
    "{{ ('a' * %d) | indent(%d) }}",
    "{{ messages | sum(start=[]) }}",
    "{{ 9 ** (9 ** %d) }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ '%%c' % 1114112 }}",
    "{{ messages | unique | list }}",
    "{{ raise_exception('x' * %d) }}",
    "{{ strftime_now('%%' * %d) }}",
    "{{ ('\\t' * 1000).expandtabs(%d) }}",
    "{% for m in messages %}{% for n in messages recursive %}{{ loop(n) }}{% endfor %}{% endfor %}",
    "{{ messages[0].content | replace('', 'a' * %d) }}",
    "{{ (1, 2) in [[[]]] }}",
    "{% generation %}{{ messages }}{% endgeneration %}",
    "{{ lipsum(n=%d) }}",
]
SIZES = [0, -1, 1, 100, 10_000, 10**6, 10**9, 10**18]


def draw(rng: Random) -> str:
    parts = [rng.choice((TEMPLATE, *PARTS)) for _ in range(rng.randint(1, 3))]
    source = "".join(
        part.replace("%%", "\0").replace("%d", str(rng.choice(SIZES))).replace("\0", "%")
        for part in parts
    )
    if rng.random() < 0.5:
        source = mutate(rng, source.encode()).decode("utf-8", "replace")
    return source


class Fuzzed:
    def __init__(self, folder: Path) -> None:
        self._worker = ForkedWorker(LIMITS)

    def case(self, rng: Random) -> str:
        return self._worker.chat(draw(rng))[0]
