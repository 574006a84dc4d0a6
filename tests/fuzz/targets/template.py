"""A chat template, rendered in a process under the limits of a text process: it may hang, take all
memory or die there, and nowhere else."""

import os
import signal
import socket
from pathlib import Path
from random import Random

from fake_router import TEMPLATE, tokenizer_json

from fuzz.mutate import mutate
from pdserve.gateway.text.errors import UnsupportedTokenizer
from pdserve.gateway.text.vocabulary import TextCard
from pdserve.gateway.text_processes.process import TextModel, work
from pdserve.gateway.text_processes.protocol import (
    SIZE_BYTES,
    TextLimits,
    TextMessage,
    head_of,
    pack,
    size_of,
)
from pdserve.services.host.process import die_with

LIMITS = TextLimits(
    load_s=5, load_bytes=64 << 20, render_s=0.2, prompt_s=0.2, prompt_bytes=64 << 20, late_s=2.0
)
MESSAGES = [{"role": "user", "content": "hello <|im_end|>"}, {"role": "assistant", "content": "x"}]
# What has broken sandboxes: growth, recursion, formats, deep values, C code that holds the GIL.
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


class Fuzzed:
    def __init__(self, folder: Path) -> None:
        self._tokenizer = tokenizer_json()
        self._card = TextCard(vocab_size=400, bos_id=None, eos_ids=(2,), adds_bos=False)

    def case(self, rng: Random) -> str:
        parts = [rng.choice((TEMPLATE, *PARTS)) for _ in range(rng.randint(1, 3))]
        source = "".join(
            part.replace("%%", "\0").replace("%d", str(rng.choice(SIZES))).replace("\0", "%")
            for part in parts
        )
        if rng.random() < 0.5:
            source = mutate(rng, source.encode()).decode("utf-8", "replace")
        files = {"tokenizer": self._tokenizer, "template": source.encode(), "generation": b""}
        ours, theirs = socket.socketpair()
        with ours:
            pid = os.fork()
            if not pid:
                ours.close()
                os._exit(self._serve(theirs, files))
            theirs.close()
            return self._ask(ours, pid)

    def _serve(self, sock: socket.socket, files: dict[str, bytes]) -> int:
        """The process of the case; 3: the template cannot be used."""
        die_with(os.getppid())
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, LIMITS.load_s)
        try:
            model = TextModel(self._card, files)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except UnsupportedTokenizer:
            return 3
        work(sock, model, LIMITS)
        return 0

    def _ask(self, sock: socket.socket, pid: int) -> str:
        asked = {"op": "chat", "messages": MESSAGES, "answer": True, "most": 10_000}
        reply = b""
        try:
            sock.sendall(pack(TextMessage(asked)))
            reply = sock.recv(SIZE_BYTES, socket.MSG_WAITALL)
            if reply:
                head = head_of(sock.recv(size_of(reply), socket.MSG_WAITALL))
        except ConnectionError:
            pass
        sock.close()
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if reply:
            return "refused" if "error" in head else "rendered"
        if code == 3:
            return "unsupported"
        assert code < 0, f"it ended with code {code}"
        return f"killed by {signal.Signals(-code).name}"
