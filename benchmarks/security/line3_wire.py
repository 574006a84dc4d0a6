"""Line 3: the data that a sniffer reads of a system and the frames it can open, the peers that
accept a certificate of the wrong role, and the cost of a change of CA or secret under load.

The sniffer is in a network namespace with gateway, router and prefill; decode and a client are in
another one. So it has every packet of every hop: those between the namespaces, and those of `lo`.
The client sends a long prompt, and a test router (own_handoff.py) requests one more hand-off, so
that a ticket is known for which to search. Twice: with certificates and --encrypt-kv, where nothing
may be found and no frame opened, and with a secret in plain text, where the same search must find
everything. With certificates the known ticket opens the frames, and none of the candidates does:
each 32 bytes that passed the workers' ports, with all other fields of the ticket given. Streams of
more than MOST_TRIED bytes, such as a tokenizer's, have too many candidates; the ticket itself is
searched for in them, too.

rotation.py changes CA and secret under load; connections.py opens many connections at once while a
certificate is replaced; tests/system/test_roles.py calls every method with the certificate of every
role. Needs root.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import connections
import rotation
from pytest_line import run_tests
from roles import SECRET, make_certificates, start, trust
from wire import Capture, Handoffs

from pdserve.engine.handoff.protocol.keys import Ticket
from pdserve.protos.common_pb2 import Start

HERE, THERE, LINK = "pdserve-a", "pdserve-b", "pds-link"
A, B = "10.213.77.1", "10.213.77.2"
GATEWAY, ROUTER, DECODE, PREFILL = f"{A}:8443", f"{A}:50050", f"{B}:50051", f"{A}:50061"
KV_PORT = 50052
HOPS = {"client": GATEWAY, "router": ROUTER, "decode": DECODE, "prefill": PREFILL}
SHOWN = {  # without certificates, by hop
    "client": ("prompt", "key"),
    "router": ("secret", "methods"),
    "decode": ("secret", "methods", "ids", "ticket"),
    "prefill": ("secret", "methods", "ids", "ticket"),
}
MARK = "xylophone quagmire"
PROMPT = f"{MARK} " * 200
KEY = "sk-" + "k3y" * 12
MOST_TRIED = 256 << 10
FOLDER = Path(__file__).parent


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def namespaces() -> Iterator[None]:
    remove_namespaces()  # those of a run that was killed
    for name in (HERE, THERE):
        ip("netns", "add", name)
    try:
        ends = [f"{LINK}0", "netns", HERE], [f"{LINK}1", "netns", THERE]
        ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for name, device, address in ((HERE, f"{LINK}0", A), (THERE, f"{LINK}1", B)):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
            ip("-n", name, "link", "set", device, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield
    finally:
        remove_namespaces()


def remove_namespaces() -> None:
    for name in (HERE, THERE):
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


def within(namespace: str) -> list[str]:
    """The beginning of a command that runs in a network namespace."""
    return ["ip", "netns", "exec", namespace]


def run_within(namespace: str, *words: str) -> Any:
    """The JSON that a Python program prints there."""
    command = [*within(namespace), sys.executable, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout)


class Sniffer:
    """Write every packet of a namespace to a file."""

    def __init__(self, namespace: str, file: Path) -> None:
        self.file = file
        self.counts: dict[str, int] = {}
        self._command = [*within(namespace), sys.executable, str(FOLDER / "sniffer.py"), str(file)]

    def __enter__(self) -> "Sniffer":
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._process.stdout.readline()  # it listens
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.terminate()
        printed, _ = self._process.communicate(timeout=60)
        self.counts = json.loads(printed)


ASK = """
import json, ssl, sys, time, urllib.request
url, ca, key, text = sys.argv[1:]
context = ssl.create_default_context(cafile=ca) if ca else None
if context: context.check_hostname = False
body = json.dumps({"prompt": text, "max_tokens": 8, "model": "SmolLM2-135M-Instruct"}).encode()
headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
until = time.monotonic() + 60
while True:
    try:
        asked = urllib.request.Request(url + "/v1/completions", body, headers)
        print(urllib.request.urlopen(asked, context=context, timeout=60).read().decode())
        break
    except OSError as error:
        if time.monotonic() > until: raise
        time.sleep(0.5)
"""


def ask(stack: ExitStack, certificates: Path | None) -> tuple[Any, Any]:
    """Start a system and run two hand-offs: (the client's answer, the test router's knowledge)."""
    worker = ["--kv-transport", "tcp", "--kv-tokens", "4096", "--threads", "1"]
    host, port = GATEWAY.split(":")
    gateway = ["--host", host, "--port", port, "--grpc-port", "8444", "--api-key", KEY]
    scheme, client_ca, folder = "http", "", []
    if certificates is not None:
        worker.append("--encrypt-kv")
        scheme, client_ca, folder = "https", str(certificates / "ca.pem"), [str(certificates)]
        own = certificates / "gateway.pem", certificates / "gateway-key.pem"
        gateway += ["--tls-cert", str(own[0]), "--tls-key", str(own[1])]

    def begin(where: str, role: str, *words: str) -> None:
        start(stack, role, *words, *trust(role, certificates), within=within(where))

    begin(HERE, "router", "--bind", ROUTER)
    begin(HERE, "gateway", *gateway, "--routers", ROUTER)
    kv = f"{B}:{KV_PORT}"
    begin(THERE, "decode", "--bind", DECODE, "--data-bind", kv, "--routers", ROUTER, *worker)
    begin(HERE, "prefill", "--bind", PREFILL, "--routers", ROUTER, *worker)
    answer = run_within(THERE, "-c", ASK, f"{scheme}://{GATEWAY}", client_ca, KEY, PROMPT)
    program = str(FOLDER / "own_handoff.py")
    return answer, run_within(HERE, program, ROUTER, DECODE, PREFILL, *folder)


def run(folder: Path, certificates: Path | None) -> dict[str, Any]:
    """The sniffer's data of a system that has run two hand-offs."""
    packets = folder / f"packets-{certificates is not None}"
    with Sniffer(HERE, packets) as sniffer, ExitStack() as stack:
        answer, own = ask(stack, certificates)
    ticket = Ticket(**{name: bytes.fromhex(part) for name, part in own["ticket"].items()})
    capture = Capture(packets)
    needles = {
        "prompt": MARK.encode(),
        "key": KEY.encode(),
        "secret": SECRET.encode(),
        "methods": b"pdserve.v1.",
        "ids": Start(prompt_ids=own["ids"][:20]).SerializeToString()[2:],
        "ticket": ticket.secret,
    }
    hops = {name: capture.of_port(int(at.split(":")[1])) for name, at in HOPS.items()}
    (sent,) = [stream for stream in capture.to_port(KV_PORT) if stream]
    handoffs = Handoffs.read(sent)
    ports = [int(at.split(":")[1]) for at in (DECODE, PREFILL)]
    told = b"|".join(capture.of_port(port, MOST_TRIED) for port in ports)
    candidates, opened = handoffs.opened_by_any(told, ticket)
    everything = capture.everything
    return {
        **sniffer.counts,
        "missing": capture.holes,
        "bytes": {name: len(data) for name, data in hops.items()} | {"kv": len(sent)},
        "found": {name: everything.count(needle) for name, needle in needles.items()},
        "hops": {
            hop: [name for name, needle in needles.items() if needle in data]
            for hop, data in hops.items()
        },
        "prompt_tokens": answer["usage"]["prompt_tokens"],
        "sealed": handoffs.hello.encrypted,
        "handoffs": len({frame.header.ticket for frame in handoffs.frames}),
        "frames": len(handoffs.frames),
        "frames_of_the_ticket": len(handoffs.of(ticket.id)),
        "opened_with_the_ticket": handoffs.opened(ticket),
        "candidates": candidates,
        "opened_by_a_candidate": opened,
    }


def wire() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as made, namespaces():
        folder = Path(made)
        make_certificates(folder / "pem")
        plain, sealed = run(folder, None), run(folder, folder / "pem")
    listened = all(
        not one["drops"]
        and not one["missing"]
        and all(one["bytes"].values())
        and one["handoffs"] == 2
        and 0 < one["frames_of_the_ticket"] == one["opened_with_the_ticket"]
        for one in (plain, sealed)
    )
    shown = all(set(names) <= set(plain["hops"][hop]) for hop, names in SHOWN.items())
    shown = shown and plain["opened_by_a_candidate"] == plain["frames_of_the_ticket"]
    hidden = sealed["sealed"] and not any(sealed["found"].values())
    hidden = hidden and not sealed["opened_by_a_candidate"]
    return {"ok": listened and shown and hidden, "plain": plain, "certificates": sealed}


def main() -> None:
    parts = {
        "wire": wire(),
        "authority": rotation.authority(),
        "secret": rotation.secret(),
        "connections": connections.storms(),
        "wrong_role": run_tests("tests/system/test_rights.py", "tests/system/test_roles.py"),
    }
    print(json.dumps({"ok": all(part["ok"] for part in parts.values()), **parts}))


if __name__ == "__main__":
    main()
