"""The table of foreign options against the names that the other servers have, and the notes about
variables and configuration keys.
"""

from pathlib import Path

import pytest
import yaml

from pdserve.cli.commands import COMMANDS, commands_with
from pdserve.cli.foreign import COMMANDS as RENAMED
from pdserve.cli.foreign import NO_COMMANDS, find_entry, notes_on
from pdserve.cli.foreign.entries import Implied, Lacking, Renamed
from pdserve.cli.foreign.table import TABLE
from pdserve.cli.main import main

PEERS = yaml.safe_load(Path(__file__).with_name("foreign_names.yaml").read_text())
OPTIONS = [o for command in COMMANDS.values() for s in command.sections() for o in s.options]
OWN = {o.flag for o in OPTIONS} | {"--config", "--help", "-h", "--version"}


def test_every_name_of_the_other_servers_is_known(subtests: pytest.Subtests) -> None:
    for peer, facts in PEERS.items():
        with subtests.test(peer):
            names = facts["names"].split()
            assert len(names) == len(set(names)) > 10
            unknown = [name for name in names if not is_known(name)]
            assert unknown == []


def is_known(name: str) -> bool:
    if name[0].islower():  # section.key of a configuration file
        section, key = name.split(".")
        return bool(find_entry(section)) and is_known("--" + key.replace("_", "-"))
    return name in OWN or find_entry(name) is not None


def test_commands_of_ollama_are_known() -> None:
    for name in PEERS["Ollama"]["commands"].split():
        assert name in {*COMMANDS, *RENAMED, *NO_COMMANDS}
    assert set(RENAMED.values()) <= set(COMMANDS)
    assert not set(NO_COMMANDS) & set(COMMANDS)


def test_entries_name_options_that_exist() -> None:
    flags = OWN | {o.flag.replace("--", "--no-", 1) for o in OPTIONS}
    for entry in TABLE:
        if isinstance(entry, Renamed):
            assert entry.flag in flags | {""}, entry
        text = entry.sentence if isinstance(entry, Lacking) else ""
        named = {word.strip("`(),;:.") for word in text.split() if word.startswith(("--", "(--"))}
        assert named <= flags | {"--ctx-size"}, entry


def test_a_name_has_one_entry_for_a_command() -> None:
    seen: dict[str, list[tuple[str, ...]]] = {}
    for entry in TABLE:
        limits = entry.commands if isinstance(entry, Renamed | Implied) else ()
        for name in entry.names:
            seen.setdefault(name, []).append(limits)
    repeated = {name: limits for name, limits in seen.items() if len(limits) > 1}
    # Only entries for some commands come before the one for all others.
    assert all(all(limits[:-1]) and not limits[-1] for limits in repeated.values()), repeated


def test_a_sentence_has_no_name_of_one_server_alone() -> None:
    """A command that accepts an option does not also refuse it by a pattern."""
    for name in ("--port", "--max-model-len", "--tool-call-parser", "--max-num-seqs"):
        assert not isinstance(find_entry(name), Lacking)
    assert find_entry("--prefix-cach") is None  # a mistyped option of pdserve
    assert find_entry("--max-num-seq") is None


def test_forms_of_a_name() -> None:
    assert find_entry("--max_model_len") is find_entry("--max-model-len")
    assert isinstance(find_entry("--compilation-config.mode"), Lacking)
    assert isinstance(find_entry("--no-enable-lora"), Lacking)
    negative = find_entry("--no-jinja")
    assert isinstance(negative, Lacking)
    cannot = find_entry("--no-metrics")
    assert isinstance(cannot, Lacking)
    assert "cannot be turned off" in cannot.sentence


def test_variables_of_other_servers_get_a_note() -> None:
    environ = {
        "OLLAMA_HOST": "0.0.0.0:11434",
        "OLLAMA_CONTEXT_LENGTH": "8192",
        "OLLAMA_KEEP_ALIVE": "5m",
        "OLLAMA_KV_CACHE_TYPE": "q4_0",
        "OLLAMA_NUM_PARALLEL": "",
        "VLLM_API_KEY": "hush",
        "LLAMA_ARG_CTX_SIZE": "1",
        "VLLM_TENSOR_PARALLEL_SIZE": "1",
        "HF_TOKEN": "hush",
        "CUDA_VISIBLE_DEVICES": "0",
        "PATH": "/bin",
        "http_proxy": "x",
        "RUST_LOG": "debug",
    }
    notes = dict(note.split(" ", 1) for note in notes_on(environ))
    assert set(notes) == {
        *("OLLAMA_HOST", "OLLAMA_CONTEXT_LENGTH", "OLLAMA_KEEP_ALIVE", "OLLAMA_KV_CACHE_TYPE"),
        *("VLLM_API_KEY", "LLAMA_ARG_CTX_SIZE"),
    }
    assert "--host 0.0.0.0 --port 11434" in notes["OLLAMA_HOST"]
    assert "--context-len 8192" in notes["OLLAMA_CONTEXT_LENGTH"]
    assert "--kv-dtype int8" in notes["OLLAMA_KV_CACHE_TYPE"]
    assert "stay loaded" in notes["OLLAMA_KEEP_ALIVE"]
    assert "--api-key ..." in notes["VLLM_API_KEY"]
    assert "hush" not in " ".join(notes.values())


KEYS = [
    ("max_model_len: 8", "the key is context_len"),
    ("tensor-parallel-size: 2", "for several GPUs"),
    ("tp_size: 1", "leave the key out"),
    ("speculative_config: {}", "speculative decoding is not supported"),
    ("enable_prefix_caching: true", "leave the key out"),
    ("engine: {max_batch_size: 4}", "not nested in sections; max_batch_size is max_running"),
    ("temperature_x: 1", "did you mean temperature"),
]


def test_keys_of_other_servers_in_a_file_are_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    file = tmp_path / "config.yaml"
    for text, part in KEYS:
        with subtests.test(text):
            file.write_text(text)
            assert main(["config", "show", "up", "--config", str(file)]) == 2
            assert part in capsys.readouterr().err


def test_an_option_of_another_command_names_it() -> None:
    assert commands_with("--routers") == ["gateway", "picker", "prefill", "decode", "report"]
