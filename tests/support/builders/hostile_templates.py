"""Chat templates that run forever, or need more memory than there is, in one step that no sandbox
within the process can interrupt.

`python -m builders.hostile_templates` renders each in a separate process, the endless ones under a
time limit and the huge ones under a memory limit, and prints as JSON how each ended.
"""

import json
import os
import resource
import signal
import socket
from dataclasses import replace

from fakes.router import tokenizer_json

from pdserve.services.common.process import die_with
from pdserve.text import UnsupportedTokenizer
from pdserve.text.model import TextModel
from pdserve.text.tokenizer import TextModelInfo
from pdserve.text.workers import WorkerLimits
from pdserve.text.workers.fork_server import work
from pdserve.text.workers.messages import SIZE_BYTES, WorkerMessage, head_of, pack, size_of

DOUBLED = (
    "{% set n = namespace(a=[0], b=[0]) %}{% for i in range(60) %}"
    "{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b] %}{% endfor %}"
)
ENDLESS = {
    "comparison": DOUBLED + "{{ n.a == n.b }}",
    "in": DOUBLED + "{{ n.a in [n.b] }}",
    "str": DOUBLED + "{{ n.a | string | length }}",
    "tojson": DOUBLED + "{{ n.a | tojson | length }}",
    "hash": DOUBLED.replace("[n.a, n.a]", "(n.a, 1)").replace("[0]", "1").replace("60", "99999")
    + "{% for i in range(99999) %}{{ {n.a: 1} | length }}{% endfor %}",
    "unique": DOUBLED.replace("[n.a, n.a]", "(n.a, n.a)")
    .replace("[n.b, n.b]", "(n.b, n.b)")
    .replace("[0]", "1")
    + "{{ [n.a, n.b] | unique | list | length }}",
    "count": DOUBLED + "{{ [n.a].count(n.b) }}",
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "power": "{{ 9 ** 999999999 }}",
}
# The initial values are small: the named operation exceeds the limit.
HUGE = {
    "sum": "{{ ([[0] * 999999] * 999) | sum(start=[]) }}",
    "percent": "{{ '%(a)1500000000s' % {'a': 1} }}",
    "indent": "{{ ('a\n' * 9999) | indent('b' * 999999) }}",
    "tojson": "{{ ([0] * 99999) | tojson(indent='a' * 99999) }}",
    "expandtabs": "{{ ('\t' * 99999).expandtabs(99999) }}",
    "lists": "{% set n = namespace(k=[]) %}{% for i in range(200) %}"
    "{% set n.k = [[0] * 999999, n.k] %}{% endfor %}",
    "times": "{{ 'a' * 1000000000 }}",
}
# Texts that a template renders in a moment and a tokenizer needs long for.
LONG = {"special tokens": "{{ (eos_token + 'a') * 1400000 }}"}
MESSAGES = [{"role": "user", "content": "hello <|im_end|>"}, {"role": "assistant", "content": "x"}]
LIMITS = WorkerLimits(
    load_s=60,
    load_bytes=1 << 30,
    render_s=60,
    prompt_s=60,
    prompt_bytes=64 << 20,
    late_s=60,
    grammar_s=60,
)


class ForkedWorker:
    """A tokenizer worker for each prompt, in a fork of this process."""

    def __init__(self, limits: WorkerLimits) -> None:
        self._limits = limits
        self._tokenizer = tokenizer_json()
        self._model_info = TextModelInfo(vocab_size=400, bos_id=None, eos_ids=(2,), adds_bos=False)

    def chat(self, template: str) -> tuple[str, str]:
        """Return how MESSAGES ended ("rendered", "refused", "unsupported" or the name of a signal)
        and the worker's error.
        """
        files = {"tokenizer": self._tokenizer, "template": template.encode(), "generation": b""}
        near, far = socket.socketpair()
        with near:
            pid = os.fork()
            if not pid:
                near.close()
                os._exit(self._serve(far, files))
            far.close()
            return self._ask(near, pid)

    def _serve(self, sock: socket.socket, files: dict[str, bytes]) -> int:
        """Serve in the fork; exit code 3: the template cannot be used."""
        die_with(os.getppid())
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, self._limits.load_s)
        try:
            model = TextModel(self._model_info, files)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except UnsupportedTokenizer:
            return 3
        work(sock, model, self._limits)
        return 0

    @staticmethod
    def _ask(sock: socket.socket, pid: int) -> tuple[str, str]:
        request = {"op": "chat", "conversation": {"messages": MESSAGES}, "max_len": 10_000}
        reply = b""
        try:
            sock.sendall(pack(WorkerMessage(request)))
            reply = sock.recv(SIZE_BYTES, socket.MSG_WAITALL)
            if reply:
                head = head_of(sock.recv(size_of(reply), socket.MSG_WAITALL))
        except ConnectionError:
            pass
        sock.close()
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if reply:
            return ("refused", head["error"]) if "error" in head else ("rendered", "")
        if code == 3:
            return "unsupported", ""
        assert code < 0, f"it ended with code {code}"
        return signal.Signals(-code).name, ""


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hurried, patient = ForkedWorker(replace(LIMITS, render_s=0.1)), ForkedWorker(LIMITS)
    ends = {
        "endless": {name: hurried.chat(template) for name, template in ENDLESS.items()},
        "huge": {name: patient.chat(template) for name, template in HUGE.items()},
    }
    print(json.dumps(ends))


if __name__ == "__main__":
    main()
