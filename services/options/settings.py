"""Settings of the commands that are not services; each service owns its settings."""

from dataclasses import dataclass

from pdserve.engine.api.sampling_bounds import BOUNDS
from pdserve.services.host.options import CertificateSettings, option

MAX_TEMPERATURE = BOUNDS["temperature"].api.high
DEFAULT_URL = "http://127.0.0.1:8000"


@dataclass(frozen=True)
class UpSettings:
    """Settings of `pdserve up`: the processes to start."""

    model: tuple[str, ...] = option(
        (), "GGUF file, model directory or Hugging Face id to serve; none: the shipped SmolLM2"
    )
    prefill: int = option(1, "prefill workers per model; 0: decode workers do all", min=0, max=64)
    decode: int = option(1, "decode workers per model", min=1, max=64)
    gateway_workers: int = option(1, "gateway processes behind the same ports", min=1, max=64)
    router_port: int = option(0, "port of the router's Generate; 0: any free one", min=0, max=65535)
    cluster_secret: tuple[str, ...] = option(
        (),
        "secret of all internal hops, for workers that are started beside; empty: certificates "
        "that only the processes of this system have",
        secret=True,
    )
    threads: int = option(
        0, "compute threads of each worker, a core each; 0: all cores, shared out", min=0, max=1024
    )


@dataclass(frozen=True)
class ClientSettings:
    """The server that a client command connects to."""

    url: str = option(DEFAULT_URL, "base URL of the server, or unix:PATH of its socket")
    api_key: tuple[str, ...] = option((), "key to present; of several the first", secret=True)


@dataclass(frozen=True)
class ChatSettings(ClientSettings):
    """Settings of a conversation in the terminal."""

    model: str = option("", "model to talk to; empty: the first that the server lists")
    system: str = option("", "system message at the start")
    temperature: float = option(
        -1.0, "0: greedy; below 0: the model's default", min=-1, max=MAX_TEMPERATURE
    )
    max_tokens: int = option(0, "longest answer in tokens; 0: what the context leaves", min=0)
    history: bool = option(True, "keep what is typed, for the arrow keys of later conversations")


@dataclass(frozen=True)
class CompleteSettings(ClientSettings):
    """Settings of a run over a file of requests."""

    model: str = option("", "model of lines that name none; empty: the first of the server")
    concurrency: int = option(16, "lines that are asked at once", min=1, max=65536)
    temperature: float = option(
        -1.0, "of lines that have none; below 0: the model's default", min=-1, max=MAX_TEMPERATURE
    )
    max_tokens: int = option(0, "of lines that have none; 0: what the context leaves", min=0)
    timeout_s: float = option(600.0, "seconds to wait for an answer", min=0.1)


@dataclass(frozen=True)
class BenchSettings(ClientSettings):
    """Settings of a load test: the requests and the reported figures."""

    model: str = option("", "model to ask; empty: the first that the server lists")
    endpoint: str = option(
        "completions", "what is asked: plain prompts, or chats", choices=("completions", "chat")
    )
    rate: float = option(
        0.0, "requests/s that arrive at random times (Poisson), whatever the server does; 0: none",
        min=0,
    )  # fmt: skip
    concurrency: int = option(
        8, "without --rate: requests that are always on their way", min=1, max=65536
    )
    requests: int = option(100, "requests that are measured", min=1)
    warmup: int = option(1, "requests before, which are not measured", min=0)
    input_tokens: int = option(128, "tokens of a prompt", min=1)
    output_tokens: int = option(64, "tokens of an answer", min=1)
    ignore_eos: bool = option(True, "answers do not end early; an extension that vLLM has, too")
    temperature: float = option(
        0.0, "0: greedy; below 0: the model's default", min=-1, max=MAX_TEMPERATURE
    )
    random_seed: int = option(
        0, "of the prompts and their times; 0: drawn, so that no prompt is cached", min=0
    )
    slo: str = option(
        "", "bounds that make a request good, as ttft=500ms,itl=50ms (also tpot, e2e): goodput"
    )
    json: str = option("", "file for the figures; empty: none")


@dataclass(frozen=True)
class TopSettings(ClientSettings):
    """Settings of the fleet view."""

    once: bool = option(False, "print it once and end")
    interval_s: float = option(1.0, "seconds between two looks", min=0.1, max=3600)


@dataclass(frozen=True)
class ReportSettings(ClientSettings, CertificateSettings):
    """Settings of a report: its sources and its output file."""

    out: str = option(
        "", "file that is written; empty: pdserve-report-TIME.tar.gz, here; -: standard output"
    )
    routers: tuple[str, ...] = option(
        (),
        "host:port of routers that are asked for the fleet, each address of a name; or "
        "kubernetes:///SERVICE:PORT (docs/discovery.md)",
    )
    scrape: tuple[str, ...] = option(
        (), "host:port of further metrics ports that are asked: of routers and workers"
    )
    cluster_secret: tuple[str, ...] = option(
        (), "secret of the routers, where they have no certificates", secret=True
    )
    trust_network: bool = option(False, "the secret may cross this network in clear")
    trace_dir: str = option("", "folder of the rings that note hand-offs; empty: that of `up`")
    logs: tuple[str, ...] = option(
        (), "files of logs that are added, as `kubectl logs` writes them; none: those of `up`"
    )
    within_s: float = option(30.0, "seconds for everything together", min=1, max=600)


@dataclass(frozen=True)
class CertsSettings:
    """Settings of new certificates."""

    days: float = option(365.0, "days for which a role's certificate is valid", min=0.01, max=3650)


@dataclass(frozen=True)
class QuantizeSettings:
    """The type to which a model is quantized."""

    type: str = option("q4k", "q4_0, q4_1, q5_0, q5_1, q8_0, or q2k to q6k")


@dataclass(frozen=True)
class HealthSettings(CertificateSettings):
    """Settings of a health probe; with TLS, it presents the certificate of the probed process."""

    timeout: float = option(2.0, "seconds to wait for an answer", min=0.1, max=60)


@dataclass(frozen=True)
class ReplaySettings:
    """Settings that select hand-offs to show, and the form of the output."""

    attempt: str = option("", "only attempts whose id begins so (hex)")
    check: bool = option(False, "compare them with the machine; exit code 1 if they differ")
    seed: bool = option(False, "print a scenario of the cluster simulation instead (JSON)")
