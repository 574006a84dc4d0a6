"""Options of the gateway, and what its parent passes to one of several gateway processes."""

import socket
from dataclasses import dataclass
from pathlib import Path

from pdserve.services.common.discovery import check_targets
from pdserve.services.common.options import KeySettings, PublicSettings, option
from pdserve.text.messages import THINKING_SWITCHES
from pdserve.text.reasoning import reasoning_parser_names
from pdserve.text.tool_parsers import tool_parser_names

NO_DATABASE = "none"
THINKING = {"auto": None, "on": True, "off": False}


@dataclass(frozen=True, slots=True)
class GatewayWorker:
    """The process `index` of `num`. The parent owns the folder, and keeps the sockets open so that
    connections wait there while a process restarts."""

    index: int
    num: int
    listener: socket.socket
    unix: socket.socket | None
    folder: str
    """Private to the processes: their own sockets, metrics and counts."""
    trace_key: bytes
    """Chooses the share of traces that all of them record."""

    @property
    def metrics_folder(self) -> Path:
        return Path(self.folder) / "metrics"

    @property
    def counts_file(self) -> Path:
        return Path(self.folder) / "connections"


def worker_name(index: int) -> str:
    """Return the name of the process in logs and ps."""
    return f"gateway {index}"


@dataclass(frozen=True)
class PromptSettings(KeySettings):
    """Options for making a prompt from a body."""

    max_body_bytes: int = option(
        8 << 20, "maximum size of a request's body, in bytes", min=1024, max=1 << 30
    )
    max_bodies_bytes: int = option(
        128 << 20,
        "bytes of all request bodies and their parsed values in memory; an API key above its share "
        "gets 429 (all keys together use at most twice as much)",
        min=1024,
    )
    text_processes: int = option(
        2,
        "tokenizer workers per model: processes that tokenize text and render templates",
        min=1,
        max=64,
    )
    text_timeout_s: float = option(
        10.0, "time limit for preparing one prompt, in seconds", min=0.001
    )
    text_memory_mb: int = option(
        224,
        "MiB of memory for preparing one prompt or grammar, in addition to the model's tokenizer",
        min=16,
    )
    text_load_memory_mb: int = option(
        1024, "MiB of memory for a model's tokenizer and template", min=64
    )
    template_kwargs: tuple[str, ...] = option(
        (*THINKING_SWITCHES, "reasoning_effort", "verbosity"),
        "names of variables that clients may set for chat templates (chat_template_kwargs)",
    )
    chat_template: str = option(
        "", "file of a Jinja chat template for all models; empty: each model's own"
    )
    thinking: str = option(
        "auto",
        "whether models think before they answer, for requests that do not specify it; auto: the "
        "chat template's default",
        choices=tuple(THINKING),
    )
    tool_parser: str = option(
        "auto",
        "format of models' tool calls; auto: detected from the chat template or the prompt",
        choices=("auto", "none", *tool_parser_names()),
    )
    reasoning_parser: str = option(
        "auto",
        "format of models' reasoning; auto: detected from the chat template",
        choices=("auto", "none", *reasoning_parser_names()),
    )


@dataclass(frozen=True)
class GatewaySettings(PromptSettings, PublicSettings):
    """Where the gateway listens, which routers it uses, and the limits for clients."""

    host: str = option("127.0.0.1", "address of the REST and gRPC servers")
    workers: int = option(1, "processes behind the same ports (docs/gateways.md)", min=1, max=64)
    port: int = option(8000, "port of the REST API; 0: any free port", min=0, max=65535)
    unix_socket: str = option(
        "", "path of a socket that also serves the REST API, without TLS, to this user's processes"
    )
    root_path: str = option(
        "", "path prefix under which a proxy serves the REST API, e.g. /llm; optional in requests"
    )
    grpc_port: int = option(0, "port of the gRPC Text service; 0: any free port", min=0, max=65535)
    routers: tuple[str, ...] = option(
        (),
        "host:port of routers, which share the requests; names are resolved repeatedly; or "
        "kubernetes:///SERVICE:PORT (docs/discovery.md)",
    )
    admin_api_key: str = option(
        "",
        "key of the operator, only for POST /shutdown; empty: the route does not exist",
        secret=True,
    )
    open_metrics: bool = option(False, "serve /metrics without an API key")
    fleet_metrics: bool = option(
        True, "include the fleet's metrics in /metrics; turn off if routers and workers are scraped"
    )
    allow_origins: tuple[str, ...] = option(
        (),
        "origins whose web pages may call the API, e.g. https://chat.example; *: any",
        flag="allow-origin",
    )
    aliases: tuple[str, ...] = option(
        (),
        "additional name of the only served model, or NAME=MODEL",
        flag="alias",
    )
    any_model: bool = option(False, "accept any model name in requests if only one model is served")
    generation_config: str = option(
        "auto",
        "sampling defaults of requests; auto: those that the model recommends; none or vllm: "
        "neutral defaults; or a JSON file, or a folder with generation_config.json",
    )
    override_generation_config: str = option(
        "",
        "JSON object of sampling defaults that replace individual values, e.g. "
        '\'{"temperature": 0.7, "max_new_tokens": 512}\'; max_tokens is the default of requests, '
        "max_new_tokens the maximum of every request's max_tokens",
    )
    strict_max_tokens: bool = option(
        False,
        "reject a max_tokens that does not fit into the context; otherwise the answer ends at the "
        "context's end",
    )
    request_timeout_s: float = option(
        600.0, "time limit of a request, in seconds", min=0.001, max=86400
    )
    queue_timeout_s: float = option(
        60.0, "time that a request may wait for its first step, in seconds", min=0.001, max=86400
    )
    max_requests: int = option(2048, "requests in progress at once; further ones get 429", min=1)
    max_unanswered: int = option(
        1024, "requests without a first token; further ones get 429", min=1
    )
    text_seconds_per_minute: float = option(
        0.0,
        "seconds of tokenization and template rendering per API key and minute; 0: no limit",
        min=0,
    )
    database_url: str = option(
        "",
        "database for files, batches and usage: sqlite:///FILE or postgresql://USER:PASSWORD@HOST/"
        "NAME; none: no database; empty: none, or for `pdserve up` a file in the user's folder",
        secret=True,
    )
    max_answers_bytes: int = option(
        512 << 20,
        "bytes of long answers that clients have not read yet; above it, the oldest answer of the "
        "key that holds the most is dropped",
        min=1024,
    )
    max_file_bytes: int = option(
        200 << 20, "maximum size of an uploaded file, in bytes", min=1024, max=1 << 40
    )
    max_files_bytes: int = option(
        4 << 30, "maximum size of all files of one API key, in bytes", min=1024
    )
    max_files: int = option(1000, "maximum number of files of one API key", min=1, max=100_000)
    batch_concurrency: int = option(
        16, "batch lines that run at once; only one while other requests wait", min=1, max=1024
    )
    retention_days: int = option(
        0,
        "days to keep usage and ended batches with their files; 0: forever",
        min=0,
        max=36500,
    )
    body_timeout_s: float = option(
        30.0, "time limit for receiving a request's body, in seconds", min=0.001
    )
    max_buffer_bytes: int = option(
        1 << 20, "bytes of an answer to buffer for a slow client", min=1024
    )
    stall_timeout_s: float = option(
        30.0, "seconds without a read by the client after which its request is cancelled", min=0.001
    )
    grammar_timeout_s: float = option(
        1.0, "time limit for compiling the grammar of a structured answer, in seconds", min=0.001
    )
    lame_duck_s: float = option(
        0.0,
        "seconds at the start of a drain in which new requests are accepted while /ready fails",
        min=0,
    )
    mcp_config: str = option(
        "", "JSON file of MCP servers whose tools chats may use (docs/mcp.md); empty: none"
    )
    mcp_max_rounds: int = option(
        8,
        "rounds of MCP tool calls in one answer, each followed by another run of the model; 0: "
        "clients carry out all calls",
        min=0,
        max=100,
    )

    def __post_init__(self) -> None:
        check_targets("--routers", self.routers)
