"""Options from flags, environment and YAML: precedence, bounds, and errors that name the flag."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.cli.options import (
    MASK,
    OptionError,
    Section,
    Settings,
    options_of,
    parse,
    render,
    resolve,
)


def option(default: Any, help: str, **extra: Any) -> Any:
    return field(default=default, metadata={"help": help, **extra})


@dataclass(frozen=True)
class Server:
    """A settings class like those of services."""

    host: str = option("127.0.0.1", "address")
    port: int = option(8000, "port", min=1, max=65535)
    ratio: float = option(0.5, "a share", min=0, max=1)
    mode: str = option("auto", "how", choices=("auto", "never"))
    cache: bool = option(True, "keep")
    debug: bool = option(False, "tell more")
    api_keys: tuple[str, ...] = option((), "key", flag="--api-key", secret=True)
    routers: tuple[str, ...] = option((), "router")

    def __post_init__(self) -> None:
        if self.mode == "never" and self.debug:
            raise ValueError("--debug contradicts --mode never")


@dataclass(frozen=True)
class Other:
    """Another group that shares an option."""

    host: str = option("elsewhere", "not the one that counts")
    depth: int = option(3, "how deep")


OPTIONS = {Server: options_of(Server), Other: options_of(Other)}
KNOWN = {o.name for options in OPTIONS.values() for o in options} | {"of_another_command"}


def settle(
    words: list[str], environ: dict[str, str] | None = None, config: Path | None = None
) -> Settings:
    sections = [Section(c.__name__, c, o) for c, o in OPTIONS.items()]
    found = parse("pdserve test", "a test", sections, (), words)
    path = Path(found.config) if found.config else config
    return resolve(OPTIONS, KNOWN, found.flags, environ or {}, path)


def refusal(*words: str, environ: dict[str, str] | None = None, config: Path | None = None) -> str:
    with pytest.raises(OptionError) as caught:
        settle(list(words), environ, config).build(Server)
    return str(caught.value)


def test_defaults() -> None:
    settings = settle([])
    assert settings.build(Server) == Server()
    assert not any(value.given for value in settings.values.values())


def test_flag_beats_environment_beats_file_beats_default(tmp_path: Path) -> None:
    file = tmp_path / "pdserve.yaml"
    file.write_text("port: 3\nratio: 0.25\nhost: file\n")
    environ = {"PDSERVE_PORT": "2", "PDSERVE_RATIO": "0.75", "PDSERVE_CONFIG": str(file)}
    settings = settle(["--port", "1"], environ)
    built = settings.build(Server)
    assert (built.port, built.ratio, built.host, built.mode) == (1, 0.75, "file", "auto")
    sources = [settings.values[name].source for name in ("port", "ratio", "host", "mode")]
    assert sources == ["flag --port", "PDSERVE_RATIO", str(file), "default"]


def test_repeatable_options(tmp_path: Path) -> None:
    flags = settle(["--api-key", "a", "--api-key", "b,c"]).build(Server)
    assert flags.api_keys == ("a", "b,c")
    env = settle([], {"PDSERVE_API_KEY": "a, b"}).build(Server)
    assert env.api_keys == ("a", "b")
    file = tmp_path / "c.yaml"
    file.write_text("routers: [x:1, y:2]\napi_key: one\n")
    built = settle(["--config", str(file)]).build(Server)
    assert (built.routers, built.api_keys) == (("x:1", "y:2"), ("one",))


def test_booleans() -> None:
    built = settle(["--no-cache", "--debug"]).build(Server)
    assert (built.cache, built.debug) == (False, True)
    assert settle([], {"PDSERVE_DEBUG": "ON"}).build(Server).debug
    built = settle(["--cache=False", "--no-debug=off"]).build(Server)
    assert (built.cache, built.debug) == (False, True)
    sentence = "--debug: 'maybe' is not true or false"
    assert refusal("--debug=maybe") == sentence
    assert refusal("--no-debug=") == "--debug (from --no-debug): '' is not true or false"
    from_environment = sentence.replace(":", " (from PDSERVE_DEBUG):", 1)
    assert refusal(environ={"PDSERVE_DEBUG": "maybe"}) == from_environment


def test_a_shared_option_fills_both_groups() -> None:
    settings = settle(["--host", "h"])
    assert (settings.build(Server).host, settings.build(Other).host) == ("h", "h")
    assert settings.build(Other, depth=9).depth == 9
    assert settle([]).build(Other).host == "elsewhere"
    assert [o.name for o in settings.options()].count("host") == 1


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--port", "70000"], ["--port", "70000 is above 65535"]),
        (["--port", "0"], ["--port", "0 is below 1"]),
        (["--port", "x"], ["--port", "'x' is not a whole number"]),
        (["--ratio", "nan"], ["--ratio", "nan"]),
        (["--mode", "often"], ["--mode", "'often'", "auto, never"]),
        (["--mode", "never", "--debug"], ["--debug contradicts --mode never"]),
        (["--prot", "1"], ["--prot"]),
        (["--por", "1"], ["--por"]),
        (["--port"], ["--port", "expected one argument"]),
        (["stray"], ["stray"]),
    ],
)
def test_invalid_flags_are_named(words: list[str], parts: list[str]) -> None:
    message = refusal(*words)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("prot: 1", ["'prot'", "did you mean port"]),
        ("port: '1'", ["--port", "'1' is not a whole number"]),
        ("port: true", ["--port", "not a whole number"]),
        ("port: 0", ["--port", "below 1"]),
        ("host: 1", ["--host", "not text"]),
        ("ratio: .nan", ["--ratio"]),
        ("debug: 1", ["--debug", "not true or false"]),
        ("[1, 2]", ["must map"]),
        ("{", ["not YAML"]),
        ("port: !!python/object/apply:os.getpid []", ["not YAML"]),
    ],
)
def test_invalid_files_are_named(tmp_path: Path, text: str, parts: list[str]) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    message = refusal(config=file)
    assert all(part in message for part in [*parts, "bad.yaml"]), message


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    assert "cannot read" in refusal(config=tmp_path / "none.yaml")
    large = tmp_path / "large.yaml"
    large.write_bytes(b"#" * (1 << 20) + b"\n")
    assert "larger than" in refusal(config=large)
    empty = tmp_path / "empty.yaml"
    empty.write_text("")
    assert settle([], config=empty).build(Server) == Server()


def test_environment() -> None:
    assert "PDSERVE_PROT" in refusal(environ={"PDSERVE_PROT": "1"})
    assert "did you mean port" in refusal(environ={"PDSERVE_PROT": "1"})
    message = refusal(environ={"PDSERVE_PORT": "x"})
    assert "--port (from PDSERVE_PORT)" in message
    # An empty variable counts as unset, and another command's option may be in a shared
    # environment.
    environ = {"PDSERVE_PORT": "", "PDSERVE_OF_ANOTHER_COMMAND": "7", "HOME": "/"}
    assert settle([], environ).build(Server) == Server()


def test_secrets_are_never_shown(tmp_path: Path) -> None:
    settings = settle(["--api-key", "hunter2", "--port", "9000"], {"PDSERVE_HOST": "0.0.0.0"})
    text = render(settings)
    assert "hunter2" not in text
    lines = [line.split("#") for line in text.splitlines()]
    assert any(MASK in line[1] and "api_key" in line[1] for line in lines if len(line) > 2)
    assert [line[1].strip() for line in lines if line[0].startswith("port:")] == ["flag --port"]
    # The printed settings can be loaded again, and give the same values except for the secret.
    file = tmp_path / "shown.yaml"
    file.write_text(text)
    assert settle(["--config", str(file)]).build(Server) == Server(port=9000, host="0.0.0.0")


def test_an_invalid_secret_is_not_quoted(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("api_key: 12345678")
    message = refusal(config=file)
    assert "--api-key" in message
    assert "12345678" not in message


def test_help_shows_every_option_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        settle(["--help"])
    assert done.value.code == 0
    text = capsys.readouterr().out
    for cls in (Server, Other):
        for item in fields(cls):
            flag = item.metadata.get("flag", "--" + item.name)
            assert (
                sum(
                    line.startswith(f"  {flag} ") or line.strip() == flag
                    for line in text.splitlines()
                )
                == 1
            )
    assert "default: 8000" in text
    assert "{auto,never}" in text
    assert max(len(line) for line in text.splitlines()) <= 100


@dataclass(frozen=True)
class Unsupported:
    value: bytes = option(b"", "no such kind")


@dataclass(frozen=True)
class Union:
    value: str | None = option(None, "no unions")


@dataclass(frozen=True)
class WithoutDefault:
    value: str = field(metadata={"help": "must have a default"})


@pytest.mark.parametrize("cls", [Unsupported, Union, WithoutDefault])
def test_unsupported_fields_are_a_programming_error(cls: type) -> None:
    with pytest.raises(TypeError, match="value"):
        options_of(cls)


@given(st.text(max_size=40), st.sampled_from(["port", "ratio", "mode", "cache", "host"]))
def test_any_text_is_a_value_or_an_option_error(text: str, name: str) -> None:
    option = next(o for o in OPTIONS[Server] if o.name == name)
    value: Any = None
    refused = ""
    try:
        value = option.parse(text, option.env)
    except OptionError as error:
        refused = str(error)
    assert option.flag in refused or type(value) is option.kind
