"""Options of the gateway, each defined once, here."""

from dataclasses import dataclass

from pdserve.gateway.http.answers.held_answers import MAX_HELD_BYTES
from pdserve.gateway.text.reasoning import reasoning_parser_names
from pdserve.gateway.text.tools import tool_parser_names
from pdserve.services.host.discovery.target import check_targets
from pdserve.services.host.options import KeySettings, PublicSettings, option

NO_DATABASE = "none"


@dataclass(frozen=True)
class PromptSettings(KeySettings):
    """Options for making a prompt from a body."""

    max_body_bytes: int = option(8 << 20, "bytes of a request's body", min=1024, max=1 << 30)
    max_bodies_bytes: int = option(
        128 << 20,
        "bytes of all bodies and of their parsed values until they are answered; a key beyond its "
        "share gets 429 (all have at most twice as much)",
        min=1024,
    )
    text_processes: int = option(
        2, "processes of each model that tokenize and fill templates", min=1, max=64
    )
    text_timeout_s: float = option(10.0, "seconds for preparing one prompt", min=0.001)
    text_memory_mb: int = option(
        224,
        "MiB that preparing one prompt or grammar may take, beside the model's tokenizer",
        min=16,
    )
    text_load_memory_mb: int = option(
        1024, "MiB that a model's tokenizer and template may take", min=64
    )
    template_kwargs: tuple[str, ...] = option(
        ("enable_thinking", "thinking", "reasoning_effort", "verbosity"),
        "names that a client may set for chat templates (chat_template_kwargs)",
    )
    tool_parser: str = option(
        "auto",
        "how models write calls of tools; auto: as their templates show, or their prompts say",
        choices=("auto", "none", *tool_parser_names()),
    )
    reasoning_parser: str = option(
        "auto",
        "how models write what they think; auto: as their chat templates show",
        choices=("auto", "none", *reasoning_parser_names()),
    )


@dataclass(frozen=True)
class GatewaySettings(PromptSettings, PublicSettings):
    """Where the gateway listens, which routers it uses, and what it lets clients do."""

    host: str = option("127.0.0.1", "address of the REST and gRPC servers")
    workers: int = option(1, "processes behind the same ports (docs/gateways.md)", min=1, max=64)
    port: int = option(8000, "port of the REST API; 0: any free one", min=0, max=65535)
    unix_socket: str = option(
        "", "path at which the REST API is served too, in clear, to this user's processes"
    )
    root_path: str = option(
        "", "path under which a proxy shows the REST API, e.g. /llm; requests may have it or not"
    )
    grpc_port: int = option(0, "port of the gRPC Text service; 0: any free one", min=0, max=65535)
    routers: tuple[str, ...] = option(
        (),
        "host:port of routers, names are resolved anew; or kubernetes:///SERVICE:PORT "
        "(docs/discovery.md); requests spread over all",
    )
    open_metrics: bool = option(False, "/metrics needs no API key, even if there are any")
    fleet_metrics: bool = option(
        True, "/metrics has the fleet's figures, too; off where routers and workers are scraped"
    )
    allow_origins: tuple[str, ...] = option(
        (),
        "origins whose web pages may call, e.g. https://chat.example; *: any",
        flag="allow-origin",
    )
    aliases: tuple[str, ...] = option(
        (),
        "another name of the served model, or NAME=MODEL; requests may have either",
        flag="alias",
    )
    any_model: bool = option(
        False, "an unknown model name in a request means the served model, if it is the only one"
    )
    strict_max_tokens: bool = option(
        False,
        "a max_tokens beyond what the context leaves is refused; otherwise the answer ends where "
        "the context does",
    )
    request_timeout_s: float = option(
        600.0, "seconds a request may take in all", min=0.001, max=86400
    )
    queue_timeout_s: float = option(
        60.0, "seconds a request may wait for its first step", min=0.001, max=86400
    )
    max_requests: int = option(2048, "requests open at once; more are answered 429", min=1)
    max_unanswered: int = option(
        1024, "requests without a first token; more are answered 429", min=1
    )
    text_seconds_per_minute: float = option(
        0.0, "seconds of tokenizing and templates of one API key in a minute; 0: any", min=0
    )
    database_url: str = option(
        "",
        "where files, batches and usage are kept: sqlite:///FILE or postgresql://USER:PASSWORD@HOST/"
        "NAME; none: nowhere; empty: nowhere, but for `pdserve up` a file in the user's folder",
        secret=True,
    )
    max_answers_bytes: int = option(
        MAX_HELD_BYTES,
        "bytes of long answers that are made and not taken, of all clients; beyond it the key that "
        "holds most loses its oldest",
        min=1024,
    )
    max_file_bytes: int = option(200 << 20, "bytes of an uploaded file", min=1024, max=1 << 40)
    max_files_bytes: int = option(4 << 30, "bytes of all files of one API key", min=1024)
    max_files: int = option(1000, "files of one API key", min=1, max=100_000)
    batch_concurrency: int = option(
        16, "lines of batches that run at once; one while other requests wait", min=1, max=1024
    )
    retention_days: int = option(
        0,
        "days that ended batches with their files, and usage, are kept; 0: for good",
        min=0,
        max=36500,
    )
    body_timeout_s: float = option(30.0, "seconds for a request's body to come", min=0.001)
    max_buffer_bytes: int = option(1 << 20, "unread bytes of an answer that are kept", min=1024)
    stall_timeout_s: float = option(
        30.0, "seconds a client may stop reading before its request is cancelled", min=0.001
    )
    grammar_timeout_s: float = option(
        1.0, "seconds for compiling the grammar of a structured answer", min=0.001
    )
    lame_duck_s: float = option(
        0.0, "seconds of the drain in which new requests are taken; /ready says no already", min=0
    )
    mcp_config: str = option(
        "", "JSON file of MCP servers whose tools are offered to chats (docs/mcp.md); empty: none"
    )
    mcp_max_rounds: int = option(
        8,
        "times in one answer that MCP tools are called and the model is asked again; 0: clients "
        "carry out all calls",
        min=0,
        max=100,
    )

    def __post_init__(self) -> None:
        check_targets("--routers", self.routers)
