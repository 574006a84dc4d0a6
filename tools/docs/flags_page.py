"""Print docs/flags.md: the options, which come from the settings, by the subjects of this file.

`make docs` writes the page, tests/test_docs.py compares it. An option without a subject, and a
number without a unit, raise ValueError.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from pdserve.cli.commands import COMMANDS, MOST_USED
from pdserve.cli.options.options import Option

HEAD = """\
# Flags

`make docs` writes this page from the code. [options.md](options.md) says where values come from;
`pdserve COMMAND --help` shows the options of one command.

Below each flag is its environment variable. The key in the file of `--config FILE`
(`PDSERVE_CONFIG`), which every command with options takes, is the flag's name with underscores
(`kv_dtype`). A flag that is *on or off* has an opposite: `--history` and `--no-history`. A
*repeatable* flag may be given several times; its variable holds a list with commas, its key a list.
"""
# Examples of the options used most, which are those that `pdserve up --help` begins with.
EXAMPLES = {
    "host": "pdserve up --host 0.0.0.0 --api-key KEY",
    "port": "pdserve up --port 8080",
    "api_key": "pdserve up --api-key KEY",
    "served_name": "pdserve up Qwen/Qwen3-0.6B --served-name assistant",
    "context_len": "pdserve up --context-len 4096",
    "max_running": "pdserve up --max-running 16",
    "device": "pdserve up Qwen/Qwen3-0.6B --device cuda",
    "isq": "pdserve up Qwen/Qwen3-0.6B --isq q4k",
    "kv_dtype": "pdserve up --kv-dtype int8",
    "prefill": "pdserve up --prefill 0",
    "decode": "pdserve up --decode 2",
    "threads": "pdserve up --threads 4",
}
# The subject of each option of `pdserve up` and of a process, in the order of the page.
SUBJECTS = {
    "Model and weights": (
        *("model", "served_name", "alias", "any_model", "task", "pooling", "pool"),
        *("weights", "isq", "context_len"),
    ),
    "Devices and kernels": ("device", "threads", "kernels", "native_isa", "enforce_eager"),
    "Memory and KV cache": (
        *("kv_dtype", "kv_tokens", "block_size", "host_engines"),
        *("prefix_cache", "shared_prefix", "prefix_index_hashes"),
    ),
    "Batching and scheduling": (
        *("max_running", "chunk_size", "step_tokens", "max_waiting", "max_queued"),
    ),
    "Disaggregation and hand-off": (
        *("prefill", "decode", "remote_prefill", "remote_prefill_threshold"),
        *("kv_transport", "shm_dir", "encrypt_kv", "data_bind", "data_advertise"),
        *("allow_mixed_weights", "allow_mixed_numerics", "exact_only"),
    ),
    "Network and TLS for clients": (
        *("host", "port", "tls_cert", "tls_key", "unix_socket", "grpc_port", "root_path"),
        *("allow_origin", "gateway_workers", "workers", "client_bind", "router_port"),
    ),
    "Network and TLS between processes": (
        *("bind", "advertise", "routers", "join_routers", "cluster_ca"),
        *("cluster_cert", "cluster_key", "cluster_secret", "trust_network"),
    ),
    "API keys and rates": (
        *("api_key", "api_key_file", "admin_api_key", "requests_per_minute"),
        *("tokens_per_minute", "text_seconds_per_minute", "rate_storage"),
    ),
    "Limits of requests": (
        *("max_requests", "max_unanswered", "request_timeout_s", "queue_timeout_s"),
        *("body_timeout_s", "stall_timeout_s", "max_body_bytes", "max_bodies_bytes"),
        *("max_buffer_bytes", "max_generate_bytes", "strict_max_tokens"),
    ),
    "Prompts, sampling and reasoning": (
        *("generation_config", "override_generation_config", "chat_template"),
        *("template_kwargs", "thinking", "reasoning_parser", "grammar_timeout_s"),
        *("text_processes", "text_timeout_s", "text_memory_mb", "text_load_memory_mb"),
    ),
    "Tools and MCP": ("tool_parser", "mcp_config", "mcp_max_rounds"),
    "Storage: files, batches, responses": (
        *("database_url", "max_files", "max_file_bytes", "max_files_bytes"),
        *("batch_concurrency", "max_answers_bytes", "retention_days"),
    ),
    "Logs, metrics and traces": (
        *("log_level", "log_format", "metrics_port", "open_metrics", "fleet_metrics"),
        *("otlp_traces_endpoint", "otlp_traces_sample", "trace_dir", "trace_mb"),
    ),
    "Health checks and shutdown": ("probe_port", "drain_s", "lame_duck_s"),
    "Endpoint picker": ("endpoints", "fallbacks", "decide_timeout_s", "conformance_headers"),
}
# The subject of an option that only other commands have, by the first of them.
TOOLS = {
    "Conversations and client commands": ("run", "chat", "complete", "top", "models"),
    "Load and measurements": ("bench",),
    "Model files, certificates, diagnostics": ("quantize", "certs", "health", "report", "replay"),
}
KINDS = {str: "text", int: "whole number", float: "number", bool: "on or off"}
UNITS = {  # by suffix of the name, of which the first that matches applies; empty: no unit
    "_per_minute": "per minute",
    "_bytes": "bytes",
    "_mb": "MiB",
    "_s": "seconds",
    "days": "days",
    "_tokens": "tokens",
    "_len": "tokens",
    "_size": "tokens",
    "_threshold": "tokens",
    "port": "",
    "timeout": "seconds",
    "requests": "requests",
    "_unanswered": "requests",
    "_waiting": "requests",
    "_queued": "requests",
    "concurrency": "requests",
    "warmup": "requests",
    "rate": "requests per second",
    "_running": "sequences",
    "_sample": "fraction",
    "_hashes": "blocks",
    "temperature": "",
    "threads": "threads",
    "prefill": "workers",
    "decode": "workers",
    "workers": "processes",
    "_processes": "processes",
    "_engines": "engines",
    "_routers": "routers",
    "_files": "files",
    "_rounds": "rounds",
    "fallbacks": "endpoints",
    "_seed": "",
}


@dataclass(frozen=True)
class Row:
    """An option, and the commands that have it with this value and this help."""

    option: Option
    commands: list[str]

    @property
    def subject(self) -> str:
        """The subject that lists the option. Raises ValueError if none does."""
        tools = [name for names in TOOLS.values() for name in names]
        if self.commands[0] in tools:
            table, name = TOOLS, self.commands[0]
        else:
            table, name = SUBJECTS, self.option.name
        for subject, names in table.items():
            if name in names:
                return subject
        raise ValueError(f"tools/docs/flags_page.py has no subject for {self.option.flag}")


def rows() -> list[Row]:
    """Return every option; one that differs between commands comes more than once."""
    found: dict[tuple[str, str, str, str], Row] = {}
    for command in COMMANDS.values():
        seen = set()  # in a command that has an option in two sections, the first counts
        for section in command.sections():
            for option in section.options:
                if option.name not in seen:
                    seen.add(option.name)
                    key = (option.name, _value(option), _default(option), option.help)
                    found.setdefault(key, Row(option, [])).commands.append(command.name)
    return list(found.values())


def _value(option: Option) -> str:
    """Which values an option accepts."""
    text = ", ".join(f"`{choice}`" for choice in option.choices) or KINDS[option.kind]
    low, high = option.min, option.max
    if low is not None and high is not None:
        text += f", {_number(low)} to {_number(high)}"
    elif low is not None:
        text += f", {_number(low)} or more"
    elif high is not None:
        text += f", at most {_number(high)}"
    return f"{text}; repeatable" if option.repeated else text


def _unit(option: Option) -> str:
    """The unit of an option that is a number, else an empty text. Raises ValueError if it is not
    known."""
    if option.kind not in (int, float):
        return ""
    for end, text in UNITS.items():
        if option.name.endswith(end):
            return text
    raise ValueError(f"tools/docs/flags_page.py has no unit for {option.flag}")


def _default(option: Option) -> str:
    value = option.default
    if option.kind is bool:
        return "on" if value else "off"
    if isinstance(value, tuple):
        return f"`{','.join(map(str, value))}`" if value else "none"
    if value == "":
        return "empty"
    if option.name.endswith("_bytes"):
        return f"`{value}` ({_size(value)})"
    return f"`{value if option.kind is str else _number(value)}`"


def _number(value: float) -> str:
    return f"{value:.15g}"


def _size(num_bytes: int) -> str:
    exponent = min((num_bytes.bit_length() - 1) // 10, 3)
    return f"{num_bytes / (1 << 10 * exponent):g} {('bytes', 'KiB', 'MiB', 'GiB')[exponent]}"


def page() -> str:
    """Return the page. Raises ValueError if the tables of this file and the options differ."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    by_subject: dict[str, list[Row]] = {}
    for row in rows():
        by_subject.setdefault(row.subject, []).append(row)
    listed = [name for names in SUBJECTS.values() for name in names]
    unknown = set(listed) - {row.option.name for found in by_subject.values() for row in found}
    if unknown or len(listed) > len(set(listed)) or set(EXAMPLES) != set(MOST_USED):
        raise ValueError(
            f"tools/docs/flags_page.py must name each option once; unknown: {sorted(unknown)}; "
            f"examples: {sorted(set(EXAMPLES) ^ set(MOST_USED))}"
        )
    yield HEAD
    yield "## Used most"
    yield ""
    yield "| flag | example | meaning |"
    yield "|---|---|---|"
    up = {row.option.name: row.option for row in rows() if "up" in row.commands}
    for name in MOST_USED:
        yield f"| `{up[name].flag}` | `{EXAMPLES[name]}` | {up[name].help} |"
    for subject in (*SUBJECTS, *TOOLS):
        yield ""
        yield f"## {subject}"
        yield ""
        yield "| flag, variable | value | unit | default | of `pdserve` | meaning |"
        yield "|---|---|---|---|---|---|"
        found = by_subject[subject]
        for row in sorted(found, key=lambda row: _place(row, subject)):
            option = row.option
            cells = (
                f"`{option.flag}`<br>`{option.env}`",
                *(_value(option), _unit(option), _default(option)),
                ", ".join(row.commands),
                option.help.replace("|", "\\|"),
            )
            yield f"| {' | '.join(cells)} |"


def _place(row: Row, subject: str) -> int:
    """Where the row stands in its subject: by the table, and for other commands by their order."""
    if subject in SUBJECTS:
        return SUBJECTS[subject].index(row.option.name)
    return TOOLS[subject].index(row.commands[0])


if __name__ == "__main__":
    print(page(), end="")
