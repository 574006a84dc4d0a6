"""What the values of foreign options are in pdserve. Each function returns flags of pdserve, and
raises OptionError, which names the alternative, if a value has no equivalent. Pure.
"""

import json
import re

from pdserve.cli.foreign.entries import Meaning, refuse
from pdserve.cli.options import OptionError
from pdserve.text.messages import THINKING_SWITCHES

SEVERAL_GPUS = (
    "a worker runs on one device and does not split a model over GPUs; for several GPUs, start one "
    "worker on each (CUDA_VISIBLE_DEVICES=1 pdserve decode --device cuda --routers ...)"
)
POOLER = (
    "--pooling last, mean or cls is how an embedding model pools, --pool how a model that also "
    "generates does; the model's files say whether vectors are normalized"
)
TEMPLATE_VARIABLES = (
    "a request sets it: chat_template_kwargs or reasoning_effort; --thinking on or off is the "
    "default, and --template-kwargs names the variables that requests may set"
)
THINKING = {
    **dict.fromkeys(("", "on", "true", "1"), "on"),
    **dict.fromkeys(("off", "false", "0"), "off"),
    "auto": "auto",
}
INHERENT_QUANTIZATION = (
    *("auto", "none", "awq", "awq_marlin", "gptq", "gptq_marlin", "marlin", "gguf", "ggml"),
    *("compressed-tensors", "mxfp4", "fbgemm_fp8"),
)
KV_DTYPES = {
    "auto": "auto",
    "float32": "float32",
    "f32": "float32",
    "float": "float32",
    "float16": "float16",
    "f16": "float16",
    "half": "float16",
    "int8": "int8",
    "q8_0": "int8",
    "bfloat16": "bf16",
    "bf16": "bf16",
}
WEIGHTS = {
    "auto": "auto",
    "bfloat16": "bf16",
    "bf16": "bf16",
    "float32": "float32",
    "float": "float32",
    "f32": "float32",
}
LEVELS = {
    "trace": "debug",
    "debug": "debug",
    "info": "info",
    "warn": "warning",
    "warning": "warning",
    "error": "error",
    "critical": "error",
    "fatal": "error",
}
VERBOSITIES = ("error", "error", "warning", "info", "debug", "debug")  # of llama.cpp, from 0
TASKS = {
    "auto": "auto",
    "generate": "generate",
    "none": "auto",
    "embed": "embed",
    "embedding": "embed",
    "pooling": "embed",
    "score": "score",
    "classify": "score",
    "rerank": "score",
}
TOOL_PARSERS = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen_coder": "qwen3_coder",
    "llama3": "llama3_json",
    "llama4_json": "llama3_json",
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "qwen3_xml": "qwen3_coder",
    "openai": "gpt_oss",
    "gpt-oss": "gpt_oss",
    "glm": "glm45",
    "glm47": "glm45",
    "deepseekv32": "deepseek_dsml",
    "minimax": "minimax_m2",
    "granite": "auto",
    "granite4": "auto",
    "xlam": "auto",
}
REASONING_PARSERS = {
    **dict.fromkeys(
        ("deepseek_r1", "deepseek_v3", "deepseek-r1", "deepseek-v3", "qwen3", "glm45", "kimi_k2"),
        "think",
    ),
    **dict.fromkeys(
        ("holo2", "minimax_m2", "olmo3", "step3", "nemotron_3", "qwen3-thinking"), "think"
    ),
    "openai_gptoss": "gpt_oss",
    "gpt-oss": "gpt_oss",
    "deepseek": "auto",
    "granite": "auto",
}
_LENGTH = re.compile(r"(?P<number>\d+(\.\d+)?)(?P<unit>[kKmM]?)")


def bare(flag: str, value: str = "") -> Meaning:
    """Return the meaning of an option without a value that is one flag of pdserve."""
    return lambda name, _: [flag, value] if value else [flag]


def one_of(flag: str, values: dict[str, str], otherwise: str) -> Meaning:
    """Return the meaning of an option whose values have other names in pdserve; `otherwise` is the
    sentence for a value that is not in the table."""

    def meaning(name: str, value: str) -> list[str]:
        if value.lower() not in values:
            raise refuse(name, value, otherwise)
        return [flag, values[value.lower()]]

    return meaning


def renamed_or_own(flag: str, values: dict[str, str]) -> Meaning:
    """Return the meaning of an option of which only some values have other names in pdserve."""
    return lambda name, value: [flag, values.get(value.lower(), value)]


def length(name: str, value: str) -> list[str]:
    """Number of tokens as vLLM writes it: 8192, 8k (thousands), 8K (of 1024), auto or -1."""
    if value in ("auto", "-1"):
        return ["--context-len", "0"]
    match = _LENGTH.fullmatch(value)
    if not match:
        raise OptionError(f"{name}: {value!r} is not a number of tokens, as in 8192 or 8k")
    factor = {"": 1, "k": 1000, "K": 1024, "m": 1000**2, "M": 1024**2}[match["unit"]]
    return ["--context-len", str(int(float(match["number"]) * factor))]


def config_or_length(name: str, value: str) -> list[str]:
    """-c is the context in llama.cpp, and the configuration file in vllm-lite."""
    return length(name, value) if value[:1].isdecimal() else ["--config", value]


def port(name: str, value: str) -> list[str]:
    if not value.isdecimal():
        raise refuse(
            name,
            value,
            "-p is a port here; for a prompt, use `pdserve run MODEL PROMPT`",
        )
    return ["--port", value]


def host(name: str, value: str) -> list[str]:
    """Address as candle-vllm and Ollama write it: host, host:port, tcp://host:port or
    unix:///path."""
    if value.startswith("unix://"):
        return ["--unix-socket", value.removeprefix("unix://")]
    value = re.sub(r"^(tcp|http|https)://", "", value).rstrip("/")
    match = re.fullmatch(r"\[(?P<v6>[^]]+)\](:(?P<p6>\d+))?|(?P<v4>[^:]*)(:(?P<p4>\d+))?", value)
    if not match:  # an IPv6 address without brackets
        return ["--host", value]
    address, number = match["v6"] or match["v4"], match["p6"] or match["p4"]
    return [*(["--host", address] if address else []), *(["--port", number] if number else [])]


def device(name: str, value: str) -> list[str]:
    if value in ("cpu", "none"):
        return ["--device", "cpu"]
    number = re.sub(r"^(cuda|gpu):?", "", value.lower())
    if number in ("", "0"):
        return ["--device", "cuda"]
    if number.isdecimal():
        raise refuse(name, value, f"set CUDA_VISIBLE_DEVICES={number} and use --device cuda")
    raise refuse(name, value, SEVERAL_GPUS)


def own_device(name: str, value: str) -> list[str]:
    return ["--device", value] if value == "auto" else device(name, value)


def gpu_layers(name: str, value: str) -> list[str]:
    if value == "0":
        return ["--device", "cpu"]
    if value in ("all", "auto", "-1") or (value.isdecimal() and int(value) >= 99):
        return ["--device", "auto"]
    raise refuse(
        name,
        value,
        "a model is not split between GPU and CPU; use --device cuda (all layers) or --device cpu",
    )


def one_device(name: str, value: str) -> list[str]:
    """A degree of parallelism: 1 is what pdserve does."""
    if value == "1":
        return []
    raise refuse(name, value, SEVERAL_GPUS)


def replicas(name: str, value: str) -> list[str]:
    if value == "1":
        return []
    raise refuse(
        name,
        value,
        f"the router spreads requests over workers: use --decode {value} on a CPU; for several "
        "GPUs, start one worker on each (CUDA_VISIBLE_DEVICES=1 pdserve decode ...)",
    )


def kv_dtype(name: str, value: str) -> list[str]:
    if value.lower() not in KV_DTYPES:
        raise refuse(
            name,
            value,
            "this format of keys and values is not supported; the closest option is "
            "--kv-dtype int8",
        )
    return ["--kv-dtype", KV_DTYPES[value.lower()]]


def quantization(name: str, value: str) -> list[str]:
    if value.lower() in INHERENT_QUANTIZATION:
        return []  # the files say how they are quantized
    if re.fullmatch(r"q\d\w*", value.lower()):
        return ["--isq", value]
    raise refuse(
        name,
        value,
        "the format of quantized files is detected without an option; to quantize other files "
        "while they load, use --isq q8_0 (or q4k)",
    )


def served_names(name: str, value: str) -> list[str]:
    first, *others = re.split(r"[ ,]+", value.strip())
    return ["--served-name", first, *(word for other in others for word in ("--alias", other))]


def origins(name: str, value: str) -> list[str]:
    try:
        listed = json.loads(value) if value.startswith("[") else value.split(",")
    except ValueError:
        raise OptionError(f"{name}: {value!r} is not a JSON list") from None
    return [word for one in listed for word in ("--allow-origin", str(one).strip())]


def verbosity(name: str, value: str) -> list[str]:
    if not value.isdecimal():
        raise OptionError(f"{name}: {value!r} is not a whole number")
    return ["--log-level", VERBOSITIES[min(int(value), len(VERBOSITIES) - 1)]]


def debug(name: str, value: str) -> list[str]:
    """OLLAMA_DEBUG: 1 or true for debug records."""
    return ["--log-level", "info" if value.lower() in ("0", "false", "") else "debug"]


def chunk(name: str, value: str) -> list[str]:
    if value.startswith("-"):
        raise refuse(name, value, "prefill is always in chunks; --chunk-size N sets their size")
    return ["--chunk-size", value]


def template_variables(name: str, value: str) -> list[str]:
    """A JSON object of variables for the chat template, of which the gateway has a default for that
    of thinking."""
    try:
        variables = json.loads(value)
    except ValueError:
        raise OptionError(f"{name}: {value!r} is not a JSON object") from None
    if not isinstance(variables, dict) or not variables.keys() <= set(THINKING_SWITCHES):
        raise refuse(name, value, TEMPLATE_VARIABLES)
    return ["--thinking", "on" if all(variables.values()) else "off"] if variables else []


def pooler(name: str, value: str) -> list[str]:
    """vLLM's pooler config: a JSON object, of which only the type of pooling has an equivalent."""
    try:
        config = json.loads(value)
    except ValueError:
        raise OptionError(f"{name}: {value!r} is not a JSON object") from None
    for kind in ("last", "mean", "cls"):
        if config in ({"pooling_type": kind.upper()}, {"seq_pooling_type": kind.upper()}):
            return ["--pooling", kind]
    raise refuse(name, value, POOLER)


def disaggregation(name: str, value: str) -> list[str]:
    if value == "null":
        return ["--prefill", "0"]
    return pd_role(value)(name, value)


def pd_role(role: str) -> Meaning:
    def meaning(name: str, value: str) -> list[str]:
        raise refuse(
            name,
            value,
            "`pdserve up` starts prefill and decode workers; to start only one kind, use "
            f"`pdserve {role} --routers HOST:PORT`",
        )

    return meaning


def pd_url(name: str, value: str) -> list[str]:
    scheme, separator, address = value.partition("://")
    if not separator:
        address = value
    elif scheme not in ("tcp", "http"):
        raise refuse(
            name,
            value,
            "write the router's address as tcp://host:port; on one machine, KV moves through "
            "shared memory without a URL (--kv-transport shm)",
        )
    return ["--routers", address.rstrip("/")]
