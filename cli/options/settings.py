"""Settings of the commands that are not services; the settings of a service are in the service's
package.
"""

from dataclasses import dataclass

from pdserve.engine.api import BOUNDS
from pdserve.services.common.options import CertificateSettings, option

MAX_TEMPERATURE = BOUNDS["temperature"].api.high
DEFAULT_URL = "http://127.0.0.1:8000"


@dataclass(frozen=True)
class UpSettings:
    """Settings of `pdserve up`: the processes to start, and how."""

    model: tuple[str, ...] = option(
        (),
        "GGUF file, model directory or Hugging Face id to serve; NAME=MODEL sets its name; "
        "none: the bundled SmolLM2",
    )
    prefill: int = option(
        1,
        "prefill workers per model; 0: decode workers compute the prompts. By default none for "
        "models that only embed or have a classification head",
        min=0,
        max=64,
    )
    decode: int = option(1, "decode workers per model", min=1, max=64)
    gateway_workers: int = option(1, "gateway processes behind the same ports", min=1, max=64)
    router_port: int = option(
        0, "port of the router's gRPC API; 0: any free port", min=0, max=65535
    )
    cluster_secret: tuple[str, ...] = option(
        (),
        "secret for all connections between processes, so that workers started separately can "
        "join; empty: certificates that only the processes of this command have",
        secret=True,
    )
    threads: int = option(
        0,
        "compute threads of each worker, one core each; 0: the workers share all cores",
        min=0,
        max=1024,
    )


@dataclass(frozen=True)
class ClientSettings:
    """The address and API key of the server to which a client command connects."""

    url: str = option(DEFAULT_URL, "base URL of the server, or unix:PATH of its socket")
    api_key: tuple[str, ...] = option(
        (), "API key to send; of several keys, the first", secret=True
    )


@dataclass(frozen=True)
class ConversationSettings:
    """Settings of a conversation in the terminal."""

    system: str = option("", "system message of the conversation")
    temperature: float = option(
        -1.0,
        "sampling temperature; 0: greedy; below 0: the model's default",
        min=-1,
        max=MAX_TEMPERATURE,
    )
    max_tokens: int = option(
        0, "tokens of an answer at most; 0: the model's default, else as many as fit", min=0
    )
    history: bool = option(True, "save input for the arrow keys of later conversations")


@dataclass(frozen=True)
class ChatSettings(ConversationSettings, ClientSettings):
    """Settings of `pdserve chat`, a conversation with a server."""

    model: str = option("", "model to use; empty: the first that the server lists")


@dataclass(frozen=True)
class RunSettings(ConversationSettings):
    """Settings of `pdserve run` beside those of the system that it starts."""

    prompts: str = option("", "questions separated by |; each is answered separately")


@dataclass(frozen=True)
class CompleteSettings(ClientSettings):
    """Settings of `pdserve complete`, which sends a file of requests."""

    model: str = option(
        "", "model for lines that do not name one; empty: the first that the server lists"
    )
    concurrency: int = option(16, "requests in progress at once", min=1, max=65536)
    temperature: float = option(
        -1.0,
        "temperature for lines that do not set one; below 0: the model's default",
        min=-1,
        max=MAX_TEMPERATURE,
    )
    max_tokens: int = option(
        0,
        "max_tokens for lines that do not set it; 0: the model's default, else as many as fit",
        min=0,
    )
    timeout_s: float = option(600.0, "seconds to wait for an answer", min=0.1)


@dataclass(frozen=True)
class BenchSettings(ClientSettings):
    """Settings of `pdserve bench`: the requests to send and the figures to report."""

    model: str = option("", "model to measure; empty: the first that the server lists")
    endpoint: str = option(
        "completions",
        "API to measure: plain prompts or chats",
        choices=("completions", "chat"),
    )
    rate: float = option(
        0.0,
        "requests per second, sent at random times (Poisson) whatever the server's load; 0: keep "
        "--concurrency requests in progress",
        min=0,
    )
    sweep: str = option(
        "",
        "measure several rates, one after the other, until one saturates the server: a list such "
        "as 1,2,4, or START:STOP:FACTOR",
    )
    concurrency: int = option(
        8, "requests in progress at all times; ignored with --rate", min=1, max=65536
    )
    dataset: str = option(
        "",
        "file with the requests to send: JSON lines with prompt or messages, or ShareGPT's JSON; "
        "empty: random prompts",
    )
    requests: int = option(100, "requests to measure, in a sweep at each rate", min=1)
    warmup: int = option(1, "requests to send first, without measuring them", min=0)
    input_tokens: int = option(128, "tokens of each prompt", min=1)
    output_tokens: int = option(64, "tokens of each answer", min=1)
    ignore_eos: bool = option(
        True, "do not end answers early; needs a server with this extension, as vLLM has"
    )
    temperature: float = option(
        0.0,
        "sampling temperature; 0: greedy; below 0: the model's default",
        min=-1,
        max=MAX_TEMPERATURE,
    )
    random_seed: int = option(
        0,
        "seed for the prompts and their times; 0: a random seed, so that no prompt is cached",
        min=0,
    )
    slo: str = option(
        "",
        "latency limits that a request must meet to count towards goodput, for example "
        "ttft=500ms,itl=50ms (also tpot, e2e)",
    )
    json: str = option("", "file to write the results to; empty: none")
    html: str = option("", "file to write a report with plots to, as one HTML page; empty: none")
    compare: tuple[str, ...] = option(
        (), "result file (--json) to compare, given twice; nothing is measured then"
    )


@dataclass(frozen=True)
class TopSettings(ClientSettings):
    """Settings of `pdserve top`, the live view of a server's workers."""

    once: bool = option(False, "print the view once and exit")
    interval_s: float = option(1.0, "seconds between two updates", min=0.1, max=3600)


@dataclass(frozen=True)
class ReportSettings(ClientSettings, CertificateSettings):
    """Settings of `pdserve report`: the sources of the diagnostic report, and its output file."""

    out: str = option(
        "",
        "file to write; empty: pdserve-report-TIME.tar.gz in the current folder; -: standard "
        "output",
    )
    routers: tuple[str, ...] = option(
        (),
        "host:port of routers to query for the fleet, at each address of a name; or "
        "kubernetes:///SERVICE:PORT (docs/discovery.md)",
    )
    scrape: tuple[str, ...] = option(
        (), "host:port of further metrics ports to read, of routers and workers"
    )
    cluster_secret: tuple[str, ...] = option(
        (), "secret of the routers, if they have no certificates", secret=True
    )
    trust_network: bool = option(False, "allow sending the secret unencrypted over this network")
    trace_dir: str = option(
        "", "folder of the ring files that record KV hand-offs; empty: the folder of `pdserve up`"
    )
    logs: tuple[str, ...] = option(
        (), "log files to add, as `kubectl logs` writes them; none: the logs of `pdserve up`"
    )
    within_s: float = option(30.0, "seconds for the whole report", min=1, max=600)


@dataclass(frozen=True)
class CertsSettings:
    """Settings of the certificates that `pdserve certs` creates."""

    days: float = option(
        365.0, "days for which each role's certificate is valid", min=0.01, max=3650
    )
    keep_existing: bool = option(
        False,
        "replace only certificates that are missing, unusable, or in the last third of their "
        "lifetime",
    )


@dataclass(frozen=True)
class QuantizeSettings:
    """The data type to which `pdserve quantize` quantizes a model."""

    type: str = option("q4k", "target type: q4_0, q4_1, q5_0, q5_1, q8_0, or q2k to q6k")


@dataclass(frozen=True)
class HealthSettings(CertificateSettings):
    """Settings of `pdserve health`; with TLS, the probe shows the certificate of the probed
    process."""

    timeout: float = option(2.0, "seconds to wait for an answer", min=0.1, max=60)


@dataclass(frozen=True)
class ReplaySettings:
    """Settings of `pdserve replay`: which hand-offs of KV to show, and in which form."""

    attempt: str = option("", "show only attempts whose id begins with this prefix (hex)")
    check: bool = option(
        False, "compare the hand-offs with the state machine; exit code 1 if they differ"
    )
    seed: bool = option(False, "print a scenario for the cluster simulation instead (JSON)")
