"""Command lines of other servers, as their documentation shows them: each sets the right options,
or ends in a sentence that says what to use instead.
"""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pdserve.cli.commands import COMMANDS
from pdserve.cli.foreign import translate
from pdserve.cli.main import find, main, parse_command
from pdserve.cli.options import OptionError

OVERRIDE = "override_generation_config"
GPUS = "for several GPUs, start one worker on each"
Q = ("unsloth/Q-GGUF:Q.gguf",)
LISTEN = {"host": "0.0.0.0", "port": 8000}
# What each line of foreign_seeds.txt sets, or words of the sentence that refuses it. `command` is
# the command that runs, if it is another one; model is that of `up` and `run`, which is repeatable.
SEEDS: dict[str, Mapping[str, Any] | str] = {
    "V1": {
        "model": (
            "unsloth/Qwen3-30B-A3B-Instruct-2507-GGUF:Qwen3-30B-A3B-Instruct-2507-Q4_K_M.gguf",
        ),
        "context_len": 128_000,
        **LISTEN,
        OVERRIDE: {"max_tokens": 32768},
    },
    "V2": GPUS,
    "V3": GPUS,
    "V4": {"model": ("/home/Meta-Llama-3.1-8B-Instruct-GPTQ-INT4-Marlin",), **LISTEN},
    "V5": GPUS,
    "V6chat": {"command": "run", "model": Q},
    "V7chat": GPUS,
    "V8compl": {
        "command": "run",
        "model": ("/path/qwq.gguf",),
        "prompts": "How are you? | How to make money?",
    },
    "V9compl": GPUS,
    "V10": {"command": "run", "model": ("u/Q-GGUF:Q.gguf",), "context_len": 262_144},
    "V11": GPUS,
    "V12": GPUS,
    "V13": GPUS,
    "V14": {"model": ("/path/D.gguf",)},
    "V15": {"model": ("/path/Q",), "isq": "q6k"},
    "V16": GPUS,
    "V17": GPUS,
    "V18": GPUS,
    "V19": GPUS,
    "V000a": {"model": ("/path/Q.gguf",), **LISTEN},
    "V000b": "set CUDA_VISIBLE_DEVICES=1",
    "V002a": {"command": "run", "model": ("/x/qwq.gguf",), "prompts": "How are you today?"},
    "V002b": {"command": "run", "model": ("/x/Q/",), "isq": "q4k", "prompts": "How are you today?"},
    "C1": {
        "model": ("/home/D/",),
        "port": 2000,
        OVERRIDE: {"temperature": 0.0, "repetition_penalty": 1.0},
    },
    "C2": {"model": ("deepseek-ai/D",)},
    "C3": {
        "model": ("/home/D.gguf",),
        "weights": "bf16",
        "port": 2000,
        OVERRIDE: {"temperature": 0.7, "repetition_penalty": 1.1},
    },
    "C4": GPUS,
    "L1": {"model": ()},
    "L2": {"model": ("/path/to/your/model",)},
    "V16one": {
        "model": "/path/Q",
        "device": "cuda",
        "isq": "q4k",
        "context_len": 200_000,
        "max_running": 2,
    },
    "V18one": {"model": "/path/Q", "device": "cuda", "max_running": 2},
}
LINES: list[tuple[str, Mapping[str, Any] | str]] = [
    # vLLM
    ("serve Qwen/Qwen2.5-1.5B-Instruct", {"model": ("Qwen/Qwen2.5-1.5B-Instruct",)}),
    (
        "serve NousResearch/Meta-Llama-3-8B-Instruct --dtype auto --api-key token-abc123",
        {"weights": "auto", "api_key": ("token-abc123",)},
    ),
    (
        "serve meta-llama/Llama-3.1-8B-Instruct --max-model-len 16k --max-num-seqs 32",
        {"context_len": 16000, "max_running": 32},
    ),
    ("serve m/x --max_model_len 1K", {"context_len": 1024}),
    ("serve m/x --tensor-parallel-size 4", GPUS),
    ("serve m/x -tp 1 --enable-prefix-caching", {"model": ("m/x",)}),
    ("serve m/x --data-parallel-size 2", "--decode 2"),
    ("serve m/x --gpu-memory-utilization 0.8", "--kv-tokens"),
    ("serve m/x --quantization awq", {"isq": ""}),
    ("serve m/x --quantization fp8", "--isq q8_0"),
    ("serve m/x --dtype half", "bf16 or float32"),
    ("serve m/x --kv-cache-dtype fp8", "--kv-dtype int8"),
    (
        "serve m/x --enable-auto-tool-choice --tool-call-parser hermes --reasoning-parser qwen3",
        {"tool_parser": "hermes", "reasoning_parser": "think"},
    ),
    ("serve m/x --served-model-name one two", {"served_name": "one", "alias": ("two",)}),
    ("serve unsloth/Qwen3-0.6B-GGUF:Q4_K_M --tokenizer Qwen/Qwen3-0.6B", "tokenizer"),
    ('serve m/x --speculative-config {"method":"ngram"}', "speculative decoding"),
    ("serve m/x --enable-lora --lora-modules a=b", "merge them into the weights"),
    ("serve m/x --no-enable-prefix-caching --revision abc", {"prefix_cache": False}),
    ("serve m/x --revision abc --uds /tmp/s", {"model": ("m/x@abc",), "unix_socket": "/tmp/s"}),
    ("serve m/x --ssl-keyfile k --ssl-certfile c", {"tls_key": "k", "tls_cert": "c"}),
    ("serve m/x --task embed --allowed-origins '[\"https://a\"]'", {"task": "embed"}),
    (
        'serve m/x --runner pooling --pooler-config {"pooling_type":"MEAN"}',
        {"task": "embed", "pooling": "mean", "pool": "none"},
    ),
    ('serve m/x --pooler-config {"seq_pooling_type":"LAST"}', {"pooling": "last"}),
    ('serve m/x --pooler-config {"pooling_type":"CLS"}', {"pooling": "cls"}),
    ('serve m/x --pooler-config {"pooling_type":"ALL"}', "--pool how a model"),
    ('serve m/x --pooler-config {"pooling_type":"MEAN","normalize":false}', "--pooling last, mean"),
    ("serve m/x --pooler-config mean", "is not a JSON object"),
    ("serve m/x --pool mean", {"task": "auto", "pool": "mean"}),
    ("serve m/x --trust-remote-code --disable-log-requests", {"log_level": "warning"}),
    ("serve m/x --kv-transfer-config {}", "pdserve prefill"),
    ("serve m/x --limit-mm-per-prompt.image 2", "serves text"),
    # SGLang
    (
        "up --model-path meta-llama/Meta-Llama-3-8B-Instruct --host 0.0.0.0 --port 30000",
        {"model": ("meta-llama/Meta-Llama-3-8B-Instruct",), "host": "0.0.0.0", "port": 30000},
    ),
    ("up --model-path m/x --tp 2", GPUS),
    ("up --model-path m/x --mem-fraction-static 0.7", "--kv-tokens"),
    ("up --model-path m/x --chunked-prefill-size 4096", {"chunk_size": 4096}),
    ("up --model-path m/x --chunked-prefill-size -1", "always in chunks"),
    (
        "up --model-path m/x --context-length 8192 --max-running-requests 16 --disable-radix-cache",
        {"context_len": 8192, "max_running": 16, "prefix_cache": False},
    ),
    ("up --model-path m/x --is-embedding", {"task": "embed"}),
    ("up --model-path m/x --attention-backend triton", "--kernels"),
    ("up --model-path m/x --disaggregation-mode prefill", "pdserve prefill --routers"),
    ("up --model-path m/x --nnodes 2 --node-rank 0", GPUS),
    ("up --model-path m/x --enable-metrics --log-level warn", {"log_level": "warning"}),
    # llama.cpp
    ("up -m model.gguf -c 2048", {"model": ("model.gguf",), "context_len": 2048}),
    ("up -m m.gguf -c pdserve.yaml", "cannot read pdserve.yaml"),
    ("up -hf ggml-org/gemma-3-1b-it-GGUF", {"model": ("ggml-org/gemma-3-1b-it-GGUF",)}),
    ("up -hf o/X-GGUF:Q8_0 -ngl 99 -fa on", {"model": ("o/X-GGUF:Q8_0",), "device": "auto"}),
    ("up -hf o/X-GGUF -hff x.gguf --jinja", {"model": ("o/X-GGUF:x.gguf",)}),
    ("up -hf org/x:Q8_0 -hff f.gguf", "both name a file"),
    ("up --model hf://org/x -hff f.gguf", {"model": ("hf://org/x:f.gguf",)}),
    (
        "up --model https://huggingface.co/org/x --revision r",
        {"model": ("https://huggingface.co/org/x@r",)},
    ),
    ("up -m m.gguf -ngl 20", "not split between GPU and CPU"),
    (
        "up -m m.gguf -t 2 -np 4 -b 512 -ub 128 -ctk q8_0 -ctv q8_0 --metrics",
        {"threads": 2, "max_running": 4, "step_tokens": 512, "chunk_size": 128, "kv_dtype": "int8"},
    ),
    ("up -m m.gguf -ctk q8_0 -ctv f16", "contradicts"),
    ("up -m m.gguf --temp 0.7 --top-k 40", {OVERRIDE: {"temperature": 0.7, "top_k": 40}}),
    ("up -m m.gguf --temp hot", "'hot' is not a number"),
    ("up -m m.gguf --embedding --pooling mean", {"task": "embed", "pooling": "mean"}),
    ("up -m m.gguf --reranking", {"task": "score"}),
    ("up -m m.gguf --mmproj p.gguf", "serves text"),
    ("up -m m.gguf -md draft.gguf", "speculative decoding"),
    ("up -m m.gguf --mlock", "how to read them"),
    ("up -m m.gguf -v --log-prefix", {"log_level": "debug"}),
    ('up -m m.gguf --chat-template-kwargs {"enable_thinking":false}', {"thinking": "off"}),
    ('up -m m.gguf --chat-template-kwargs {"x":1}', "a request sets it: chat_template_kwargs"),
    ("up -m m.gguf -ts 3,1 ", GPUS),
    ("up -m m.gguf --grammar-file g", "response_format"),
    # Ollama
    ("run hf.co/o/X-GGUF:Q4_K_M", {"model": ("hf.co/o/X-GGUF:Q4_K_M",)}),
    ("run m/x why is it blue", {"model": ("m/x",), "prompt": ["why", "is", "it", "blue"]}),
    ("run m/x --keepalive 5m", "stay loaded"),
    ("run m/x --think", {"thinking": "on"}),
    ("run m/x --think=high", "reasoning_effort"),
    ("create x", "Modelfiles"),
    ("stop m/x", "pdserve ps"),
    # vLLM.rs, candle-vllm and vllm-lite
    ("up --m o/x --h 127.0.0.1:2000 --ui-server", {"host": "127.0.0.1", "port": 2000}),
    (
        "up --m o/X-GGUF --f Q3_K_S --h unix:///s",
        {"model": ("o/X-GGUF:Q3_K_S",), "unix_socket": "/s"},
    ),
    ("up --m o/x --kvcache-dtype turbo4", "--kv-dtype int8"),
    ("up --m o/x --fp8-kvcache", "--kv-dtype int8"),
    ("up --m o/x --yarn-scaling-factor 4.0", "rope_scaling"),
    ("up --w a --f b", "--w and --f both name a model"),
    ("up --w a --m b", "--w and --m both name a model"),
    ("up --w", "--w: a value is required"),
    ("up --w --port 1", "--w: a value is required"),
    ("up --pd-server", "pdserve prefill --routers"),
    ("decode --pd-server", "pdserve prefill --routers"),
    ("up --pd-url tcp://h:1", "itself"),
    ("prefill --pd-url file:///sockets", "shared memory"),
    ("prefill --pd-server --pd-url tcp://host:8100/", {"routers": ("host:8100",)}),
    ("decode --pd-client --pd-url host:8100", {"routers": ("host:8100",)}),
    ("prefill --p 1", "--p: `pdserve prefill` has no option --port"),
    ("decode --port 1", "an option of `pdserve up`, `pdserve run`, `pdserve gateway`"),
    ("up -p 9000 -m /m --max-batch-size 8", {"port": 9000, "max_running": 8}),
    ("up -p hello", "use `pdserve run MODEL PROMPT`"),
    ("up a --model b", "both set model"),
    ("run -m o/x --temp 0 -- hello", {"model": ("o/x",), "prompt": ["hello"]}),
    (
        "run --model=o/x --revision abc Hello",
        {"model": ("o/x@abc",), "prompt": ["Hello"]},
    ),
    (
        'up m --override-generation-config={"top_k":3} --temp 0.2',
        {OVERRIDE: {"top_k": 3, "temperature": 0.2}},
    ),
    ("up m --device auto --cpu=false --embedding=false", {"device": "auto", "task": "auto"}),
    ("up m --embedding=true", {"task": "embed"}),
    ("up m --embedding=no", {"task": "auto"}),
    ("up m --cpu=maybe", "--cpu: 'maybe' is not true or false"),
    ("up m --cpu=", "--cpu: '' is not true or false"),
    ("up m --enable-prefix-caching=maybe", "'maybe' is not true or false"),
    ("up m --flash-attn=maybe", "--flash-attn: 'maybe' is not on, off or auto"),
    ("up m --flash-attn=auto --enforce-eager=false", {"enforce_eager": False}),
    ("up m -n 99", {OVERRIDE: {"max_tokens": 99}}),
    ("up m -n -1", {OVERRIDE: ""}),
    ("up m --no-trust-remote-code", {"model": ("m",)}),
    ("run -m o/x llama drink water", {"prompt": ["llama", "drink", "water"]}),
    ("up --model o/X-GGUF -hff x.gguf", {"model": ("o/X-GGUF:x.gguf",)}),
    ("up --model o/X-GGUF --revision r -hff x.gguf", {"model": ("o/X-GGUF@r:x.gguf",)}),
    ("up --model o/X-GGUF:Q4_0 -hff x.gguf", "--model and -hff both name a file"),
]


def outcome(words: list[str]) -> tuple[dict[str, Any], str]:
    """Return the options that a command line sets with `command` and positional arguments, or the
    sentence that refuses it."""
    try:
        command = find(words[0], words[1:])
        settings, positionals = parse_command(command, "pdserve", words[1:])
    except OptionError as error:
        return {}, str(error)
    values = {name: value.value for name, value in settings.values.items()}
    return {**positionals, **values, "command": command.name}, ""


def check(words: list[str], expected: Mapping[str, Any] | str) -> None:
    values, sentence = outcome(words)
    if isinstance(expected, str):
        assert expected in sentence, values
        assert "\n" not in sentence
        return
    assert sentence == ""
    expected = {"command": {"serve": "up"}.get(words[0], words[0]), **expected}
    if text := values.get(OVERRIDE):
        values[OVERRIDE] = json.loads(text)
    assert {name: values[name] for name in expected} == expected


def test_seed_lines(subtests: pytest.Subtests) -> None:
    seeds = Path(__file__).with_name("foreign_seeds.txt").read_text().splitlines()
    assert [seed.split("|")[0] for seed in seeds] == list(SEEDS)
    for seed in seeds:
        name, command, arguments = seed.split("|", 2)
        with subtests.test(name):
            check([command, *shlex.split(arguments)], SEEDS[name])


def test_lines_of_documentation(subtests: pytest.Subtests) -> None:
    for line, expected in LINES:
        with subtests.test(line):
            words = line.split() if "{" in line else shlex.split(line)
            check(words, expected)


def test_words_after_the_separator_are_no_options() -> None:
    assert find("chat", ["--", "-m", "o/x"]).name == "chat"
    assert find("up", ["--", "--prompts"]).name == "up"
    options = [option for section in COMMANDS["run"].sections() for option in section.options]
    words = translate("run", options, ["-m", "o/x", "--", "What", "--temperature"])
    assert words[:2] == ["--model", "o/x"]
    assert words[-3:] == ["--", "What", "--temperature"]


def test_an_option_after_the_separator_is_refused() -> None:
    for line in (
        "run m -- --temperature 0.5",
        "run m hello -- --temperature=0.5",
        "run m -- --top-k 3",
        "chat -- --system x",
        "up m -- --decode 2",
    ):
        _, sentence = outcome(line.split())
        assert "comes after `--`, where no word is an option; put options before" in sentence, line
    for question in (
        "--temperature 0 is greedy?",
        "--temperature=0.5 means what?",
        "--top-k=3 is?",
    ):
        values, _ = outcome(["run", "m", "--temperature", "0.5", "--", question])
        assert (values["temperature"], values["prompt"]) == (0.5, [question])


MISTYPED = [
    ("up --prefil 1", "--prefil is unknown (did you mean --prefill?)"),
    ("chat --urll x", "--urll is unknown (did you mean --url?)"),
    ("chat -temperature 1", "-temperature is unknown (did you mean --temperature?)"),
    ("up --max-num-seq 3", "did you mean --max-num-seqs"),
    ("up --pd-serve", "`pdserve up --help` lists the options"),
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


def test_help_begins_with_the_most_used_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["up", "--help"])
    lines = capsys.readouterr().out.splitlines()
    titles = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert titles[:4] == ["positional arguments:", "general:", "most used:", "system:"]
    assert len(COMMANDS["up"].most_used) == 12
