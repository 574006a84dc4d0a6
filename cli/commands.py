"""The table of pdserve's commands. A command's dependencies are imported only when it runs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from pdserve.cli.options import Positional, Section, Settings, options_of

# (title, "module:Class", fields that are not options of this command)
SectionSpec = tuple[str, str, tuple[str, ...]]

STOPPED = 130  # the exit code of a command that Ctrl-C ended

GATEWAY = "pdserve.gateway.settings:GatewaySettings"
ROUTER = "pdserve.services.router.settings:RouterSettings"
PREFILL = "pdserve.services.worker.settings:PrefillSettings"
PICKER = "pdserve.services.picker.settings:PickerSettings"
DECODE = "pdserve.services.worker.settings:DecodeSettings"
ENGINE = "pdserve.engine.api.config:EngineConfig"

# `up` sets these itself: addresses, and the credentials of the processes that it starts.
UP_OWNS = (
    "bind",
    "advertise",
    "data_bind",
    "data_advertise",
    "routers",
    "cluster_secret",
    "trust_network",
    "cluster_ca",
    "cluster_cert",
    "cluster_key",
    "client_bind",
    "probe_port",
    "threads",
    "shm_dir",
    "metrics_port",
    "host_engines",
    "workers",  # --gateway-workers here
)


@dataclass(frozen=True, slots=True)
class Command:
    """A command of pdserve: its name, help text, options and positional arguments. `entry` names
    the function that runs it: "module:function(Settings, positionals) -> exit code"."""

    name: str
    summary: str
    entry: str
    section_specs: tuple[SectionSpec, ...] = ()
    positionals: tuple[Positional, ...] = ()
    most_used: tuple[str, ...] = ()  # names of the options with which the help begins

    def sections(self) -> list[Section]:
        return [
            Section(title, cls, options_of(cls, skip))
            for title, class_path, skip in self.section_specs
            for cls in [resolve_name(class_path)]
        ]

    def run(self, settings: Settings, positionals: Mapping[str, Any]) -> int:
        function: Callable[[Settings, Mapping[str, Any]], int] = resolve_name(self.entry)
        return function(settings, positionals)


def _service(
    name: str, summary: str, *sections: tuple[str, str], positionals: tuple[Positional, ...] = ()
) -> Command:
    specs = tuple((title, class_path, ()) for title, class_path in sections)
    return Command(name, summary, f"pdserve.cli.roles:{name}", specs, positionals)


def _tool(name: str, summary: str, title: str, settings: str, *positionals: Positional) -> Command:
    section = (title, f"pdserve.cli.options.settings:{settings}", ())
    return Command(name, summary, f"pdserve.cli.{name}:run", (section,), positionals)


WORKER_ENGINE = ("model and engine", ENGINE)
# A positional argument that sets the option of the same name.
MODEL = Positional(
    "model", "the same as --model: GGUF file, model directory or Hugging Face id", optional=True
)
HUB_MODEL = "Hugging Face id: org/name, org/name:Q4_K_M or org/name:file.gguf"
MOST_USED = (
    *("host", "port", "api_key", "served_name", "context_len", "max_running"),
    *("device", "isq", "kv_dtype", "prefill", "decode", "threads"),
)
UP_SECTIONS: tuple[SectionSpec, ...] = (
    ("system", "pdserve.cli.options.settings:UpSettings", ()),
    ("HTTP and gRPC for clients", GATEWAY, UP_OWNS),
    ("routing", ROUTER, UP_OWNS),
    ("workers", PREFILL, UP_OWNS),
    ("decode workers", DECODE, UP_OWNS),
    ("model and engine", ENGINE, (*UP_OWNS, "model")),
)
COMMANDS = {
    command.name: command
    for command in (
        Command(
            "up",
            "start a complete system on this machine",
            "pdserve.cli.up.command:run",
            UP_SECTIONS,
            (MODEL,),
            MOST_USED,
        ),
        Command(
            "run",
            "start a system and talk to its model; stop it at the end",
            "pdserve.cli.run:run",
            (
                ("conversation", "pdserve.cli.options.settings:RunSettings", ()),
                *UP_SECTIONS,
            ),
            (
                MODEL,
                Positional(
                    "prompt",
                    "a question, after whose answer the command ends; none: a conversation",
                    repeated=True,
                    optional=True,
                ),
            ),
            MOST_USED,
        ),
        _service("gateway", "serve HTTP and gRPC to clients", ("gateway", GATEWAY)),
        _service("router", "choose workers for requests", ("router", ROUTER)),
        _service(
            "picker", "choose endpoints for a Kubernetes Gateway (ext_proc)", ("picker", PICKER)
        ),
        _service(
            "prefill",
            "compute the KV of prompts and send it",
            ("worker", PREFILL),
            WORKER_ENGINE,
            positionals=(MODEL,),
        ),
        _service(
            "decode",
            "receive KV and generate tokens",
            ("worker", DECODE),
            WORKER_ENGINE,
            positionals=(MODEL,),
        ),
        _tool("chat", "talk to a server in the terminal", "chat", "ChatSettings"),
        _tool(
            "complete",
            "run a JSONL file of requests; an interrupted run resumes",
            "batch",
            "CompleteSettings",
            Positional(
                "in",
                "file with one request per line: OpenAI batch lines, or objects with "
                '"prompt" or "messages"',
            ),
            Positional(
                "out", "file with one result per line; requests with a result are not sent again"
            ),
        ),
        _tool(
            "bench",
            "send load to a running server and measure its performance",
            "load",
            "BenchSettings",
        ),
        _tool("top", "watch the workers of a running server", "view", "TopSettings"),
        _tool("models", "list the models of a running server", "server", "ClientSettings"),
        Command(
            "pull",
            "download a model",
            "pdserve.cli.hub:pull",
            positionals=(Positional("model", HUB_MODEL),),
        ),
        Command("ls", "list the models on this machine", "pdserve.cli.hub:ls"),
        Command(
            "rm",
            "remove a downloaded model",
            "pdserve.cli.hub:rm",
            positionals=(Positional("model", "Hugging Face id: org/name"),),
        ),
        Command("ps", "list your running systems on this machine", "pdserve.cli.ps:run"),
        _tool(
            "quantize",
            "write a quantized copy of a GGUF model",
            "quantization",
            "QuantizeSettings",
            Positional("model", "GGUF file, or a Hugging Face id as org/name:file.gguf"),
            Positional("out", "output file"),
        ),
        _tool(
            "health",
            "probe host:port (gRPC) or a URL (HTTP); exit code 0 if it serves",
            "probe",
            "HealthSettings",
            Positional("address", "host:port of a gRPC server, or an http:// URL"),
        ),
        Command(
            "certs",
            "create a cluster's authority and the certificates of its processes",
            "pdserve.cli.credentials:certs",
            (("certificates", "pdserve.cli.options.settings:CertsSettings", ()),),
            (
                Positional(
                    "target",
                    "output folder, or kubernetes:///PREFIX for Secrets PREFIX-ROLE in the pod's "
                    "namespace; an authority that is already there is reused",
                ),
            ),
        ),
        Command(
            "key",
            "create an API key and its line for --api-key-file",
            "pdserve.cli.credentials:key",
            positionals=(Positional("name", "name of the key's owner, for the log"),),
        ),
        _tool(
            "replay",
            "print recorded hand-offs, check them, or convert them to a simulation",
            "replay",
            "ReplaySettings",
            Positional("ring", "ring file, or a folder of them (--trace-dir)", repeated=True),
        ),
        _tool(
            "report",
            "write diagnostics of a broken system to one file, without secrets",
            "report",
            "ReportSettings",
        ),
        Command(
            "demo",
            "start a system, send a short and a long question over each transport, stop",
            "pdserve.cli.demo:run",
        ),
    )
}


def commands_with(flag: str) -> list[str]:
    """Return the names of the commands that have this flag."""
    return [
        command.name
        for command in COMMANDS.values()
        if any(o.flag == flag for s in command.sections() for o in s.options)
    ]


def known_names() -> set[str]:
    """Return the names of the options of all commands."""
    return {o.name for c in COMMANDS.values() for s in c.sections() for o in s.options}
