"""Option names of vLLM.rs and candle-vllm, and suggestions for a mistyped word."""

from collections.abc import Sequence

import pytest

from pdserve.cli.commands import COMMANDS
from pdserve.cli.main import main, parse_command
from pdserve.cli.options import OptionError, translate
from pdserve.cli.options.aliases import ALIASES, BARE, SAME

FLAGS = {
    name: {option.flag for section in COMMANDS[name].sections() for option in section.options}
    for name in ("up", "prefill", "decode")
}


def translated(command: str, line: str) -> Sequence[str]:
    return translate(command, FLAGS[command], line.split())


MEANINGS = [
    ("up", "--w /models/x", "--model /models/x"),
    ("up", "--m org/name", "--model org/name"),
    ("up", "--f=x.gguf --port 1", "--model x.gguf --port 1"),
    ("up", "--m org/name --p 2 --f x.gguf", "--model org/name:x.gguf --port 2"),
    ("up", "--d 0", "--device cuda"),
    ("decode", "--d cpu", "--device cpu"),
    ("up", "--isq q4k --max-num-seqs 8", "--isq q4k --max-running 8"),
    ("decode", "--max-model-len=4096", "--context-len 4096"),
    ("prefill", "--pd-server --pd-url tcp://host:8100/", "--routers host:8100"),
    ("decode", "--pd-client --pd-url host:8100", "--routers host:8100"),
]


def test_an_alias_is_parsed_as_its_option(subtests: pytest.Subtests) -> None:
    for command, line, wanted in MEANINGS:
        with subtests.test(command=command, line=line):
            assert translated(command, line) == wanted.split()
            parse_command(COMMANDS[command], "pdserve", line.split())  # and is parsed


LACKING = [
    ("up", "--fp8-kvcache", "--kv-dtype int8"),
    ("up", "--d 0,1", "on one device"),
    ("up", "--d 2", "CUDA_VISIBLE_DEVICES=2"),
    ("up", "--pd-server", "pdserve prefill --routers"),
    ("decode", "--pd-server", "use `pdserve prefill`"),
    ("prefill", "--pd-url file:///sockets", "shared memory"),
    ("up", "--pd-url tcp://h:1", "itself"),
    ("up", "--w a --f b", "--w and --f"),
    ("up", "--w a --m b", "--w and --m"),
    ("up", "--w", "--w: a value is required"),
    ("up", "--w --port 1", "--w: a value is required"),
    ("prefill", "--p 1", "--p: `pdserve prefill` has no option --port"),
]


def test_an_option_that_pdserve_lacks_is_reported(subtests: pytest.Subtests) -> None:
    for command, line, part in LACKING:
        with subtests.test(command=command, line=line):
            with pytest.raises(OptionError) as caught:
                translated(command, line)
            assert part in str(caught.value)


def test_no_alias_is_an_option_with_another_meaning() -> None:
    assert not set(ALIASES) & set().union(*FLAGS.values())
    assert set(SAME.values()) <= FLAGS["up"]
    assert BARE


MISTYPED = [
    ("up --prefil 1", "--prefil is unknown (did you mean --prefill?)"),
    ("chat --urll x", "--urll is unknown (did you mean --url?)"),
    ("chat -temperature 1", "-temperature is unknown (did you mean --temperature?)"),
    ("up --max-num-seq 3", "did you mean --max-num-seqs"),
    ("up --temp 1", "`pdserve up --help` lists the options"),
    ("up --zzzzzz", "`pdserve up --help` lists the options"),
    ("chta", "did you mean chat"),
    ("--w x", "the command must come first, as in `pdserve up --w ...`"),
    ("up --model /none/such.gguf --prefil=0", "did you mean --prefill"),
]


def test_a_mistyped_word_gets_a_suggestion(
    capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    for line, part in MISTYPED:
        with subtests.test(line):
            code, err = main(line.split()), capsys.readouterr().err
            assert code == 2
            assert part in err
            assert "Traceback" not in err


def test_a_value_may_begin_with_dashes() -> None:
    words = ["--temperature", "-1", "--system", "-be brief", "--model=--x"]
    settings, _ = parse_command(COMMANDS["chat"], "pdserve chat", words)
    values = {name: settings.values[name].value for name in ("temperature", "system", "model")}
    assert values == {"temperature": -1.0, "system": "-be brief", "model": "--x"}
