"""The command table: every command's help, lazy imports, and errors that name the mistake."""

import ast
import os
import resource
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name

import pytest

from pdserve.cli.commands import COMMANDS, UP_OWNS, known_names
from pdserve.cli.main import main
from pdserve.cli.options import options_of
from pdserve.cli.roles import guarded
from pdserve.services.common.process import GRPC_POLLER

ROOT = Path(__file__).parents[2]


def run(*words: str, block: tuple[str, ...] = (), timeout_s: float = 100) -> tuple[int, str, str]:
    """Run the command line in a process where some modules cannot be imported."""
    code = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] in {block!r}:\n"
        "            raise ModuleNotFoundError(f'{name} is not installed', name=name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "from pdserve.cli.main import main\n"
        f"code = main({list(words)!r})\n"
        "print(sorted(m for m in ('torch', 'grpc', 'fastapi', 'numpy') if m in sys.modules))\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout_s
    )
    return done.returncode, done.stdout, done.stderr


def test_a_router_configures_grpc_polling_before_the_import() -> None:
    code = (
        "import os, sys\n"
        "class Look:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'grpc':\n"
        "            os.write(1, os.environ.get('GRPC_EXPERIMENTS', 'nothing').encode())\n"
        "            os._exit(0)\n"
        "sys.meta_path.insert(0, Look())\n"
        "from pdserve.cli.main import main\n"
        "main(['router', '--cluster-secret', 's' * 32])\n"
    )
    for given, expected in ((None, GRPC_POLLER), ("-x", "-x")):
        env = {key: value for key, value in os.environ.items() if key != "GRPC_EXPERIMENTS"}
        env |= {"GRPC_EXPERIMENTS": given} if given else {}
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env
        )
        assert done.stdout == expected, done.stderr


def test_overview_and_version_import_nothing_heavy() -> None:
    code, out, _ = run("--help")
    assert code == 0
    assert all(f"  {name} " in out for name in (*COMMANDS, "config show"))
    assert out.endswith("[]\n")
    code, out, _ = run("--version")
    assert code == 0
    assert out.startswith("pdserve 0.")


def test_help_of_every_command(
    capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    for name in COMMANDS:
        with subtests.test(name):
            with pytest.raises(SystemExit) as done:
                main([name, "--help"])
            text = capsys.readouterr().out
            assert done.value.code == 0
            assert text.startswith(f"usage: pdserve {name}")
            assert COMMANDS[name].summary in text.replace("\n", " ")
            assert max(len(line) for line in text.splitlines()) <= 100


@pytest.mark.parametrize("columns", [40, 80])
def test_help_fits_the_terminal(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit):
        main(["chat", "--help"])
    text = capsys.readouterr().out
    assert max(len(line) for line in text.splitlines()) <= columns
    assert "--no-history" in text


def test_entries_exist(subtests: pytest.Subtests) -> None:
    """The functions named in the table exist; this test does not import their modules' imports."""
    for name in COMMANDS:
        with subtests.test(name):
            module, function = COMMANDS[name].entry.split(":")
            source = ROOT / (module.removeprefix("pdserve.").replace(".", "/") + ".py")
            nodes = ast.parse(source.read_text()).body
            assert function in {n.name for n in nodes if isinstance(n, ast.FunctionDef)}


def test_settings_are_light() -> None:
    """`known_names` imports the settings of all commands; none may import torch or grpc."""
    _, out, _ = run("config", "show", "decode", block=("torch", "numpy", "grpc", "fastapi"))
    assert out.endswith("[]\n")
    assert "kv_transport: auto" in out


@pytest.mark.parametrize("role", ["gateway", "router"])
def test_gateway_and_router_need_no_torch(role: str, tmp_path: Path) -> None:
    """They start up to their servers without torch, what the control image lacks (docker/lock.py),
    or modules that are needed only later: the given address cannot be bound.
    """
    database = ("--database-url", f"sqlite:///{tmp_path}/kept.db")
    words = {
        "gateway": ("--host", "203.0.113.1", "--routers", "127.0.0.1:1", *database),
        "router": ("--bind", "203.0.113.1:1"),
    }[role]
    secret = ("--cluster-secret", "s" * 32, "--trust-network")
    later = ("sqlalchemy", "llguidance", "mcp")
    lacking = ("numpy", "gguf", "huggingface_hub", "rich", "prompt_toolkit")
    block = ("torch", "transformers", *lacking, *later)
    code, out, err = run(role, *words, *secret, block=block)
    assert code == 1, err
    assert "203.0.113.1" in err
    assert "Traceback" not in err
    assert "'grpc'" in out
    assert "torch" not in out


def test_a_service_raises_its_limit_of_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    try:
        assert guarded(lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0]) == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


MISTAKES = [
    (["upp"], "did you mean up"),
    (["config", "hide"], "config show"),
    (["up", "--prt", "1"], "--prt"),
    (["up", "--port", "70000"], "--port: 70000 is above"),
    (["up", "--prefill", "0", "--remote-prefill", "always"], "contradicts --prefill 0"),
    (["up", "--threads", "9999"], "--threads"),
    (["up", "--served-name", "x", "--model", "a", "--model", "b"], "--served-name"),
    (["up", "--model", "a", "--model", "a"], "twice"),
    (["up", "--api-key-file", "/nonexistent"], "--api-key-file"),
    (["router"], "--cluster-secret is required (or set PDSERVE_CLUSTER_SECRET)"),
    (["router", "--cluster-secret", "x"], "at least 32 bytes"),
    (["router", "--cluster-ca", "x"], "must be set together"),
    (
        ["decode", "--cluster-secret", "x" * 32, "--routers", "r:1", "--encrypt-kv"],
        "certificates",
    ),
    (["up", "--cluster-secret", "x" * 32, "--encrypt-kv"], "contradicts"),
    (["gateway", "--cluster-secret", "x"], "--routers is required"),
    (["decode", "--cluster-secret", "x", "--routers", "r:1", "--threads", "999"], "--threads"),
    (["health"], "address"),
]


def test_mistakes_are_named(capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests) -> None:
    for words, part in MISTAKES:
        with subtests.test(" ".join(words)):
            code, err = main(words), capsys.readouterr().err
            assert code == 2
            assert part in err


def test_config_show(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_CLUSTER_SECRET", "hush")
    assert main(["config", "show", "router", "--remote-prefill", "never"]) == 0
    out = capsys.readouterr().out
    assert "hush" not in out
    assert any(
        line.split() == ["remote_prefill:", "never", "#", "flag", "--remote-prefill"]
        for line in out.splitlines()
    )
    assert "# PDSERVE_CLUSTER_SECRET" in out
    assert main(["config", "show"]) == 0
    assert "# default" in capsys.readouterr().out


def test_an_unknown_variable_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDSERVE_PREFIL", "2")
    assert main(["config", "show"]) == 2
    assert "did you mean prefill" in capsys.readouterr().err


def test_options_that_up_sets_are_fields_of_a_service() -> None:
    fields = {
        option.field
        for command in ("gateway", "router", "prefill", "decode")
        for _, where, _ in COMMANDS[command].section_specs
        for option in options_of(resolve_name(where))
    }
    assert set(UP_OWNS) <= fields


def test_an_option_has_one_meaning() -> None:
    """Options of one name take the same values in all commands, so one environment fits all."""
    kinds: dict[str, set[object]] = {}
    for command in COMMANDS.values():
        for section in command.sections():
            for option in section.options:
                values = (option.kind, option.min, option.max, option.choices)
                kinds.setdefault(option.name, set()).add(values)
    assert set(kinds) == known_names()
    assert {name for name, found in kinds.items() if len(found) > 1} == set()


def test_gateway_and_router_share_options_of_one_meaning() -> None:
    gateway, router = (
        {option.name for section in COMMANDS[name].sections() for option in section.options}
        for name in ("gateway", "router")
    )
    timeouts = {"request_timeout_s", "queue_timeout_s"}
    slow_readers = {"max_buffer_bytes", "stall_timeout_s"}
    trust = {"cluster_secret", "cluster_ca", "cluster_cert", "cluster_key", "tls_cert", "tls_key"}
    trust |= {"trust_network"}
    clients = {"api_key", "api_key_file", "shared_prefix"}
    clients |= {"requests_per_minute", "tokens_per_minute", "rate_storage"}
    others = {"drain_s", "log_level", "log_format", "otlp_traces_endpoint", "otlp_traces_sample"}
    assert gateway & router == trust | clients | others | timeouts | slow_readers
