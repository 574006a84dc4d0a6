"""Models that cannot be loaded, each derived from a good one, and the expected text of the
message.

Over 400 lines: one table, and the small functions that make its rows.
"""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import torch
from safetensors.torch import load_file, save_file

from builders.tiny_models import write_tiny
from builders.write_gguf import write_gguf


class WrongFile(NamedTuple):
    """One invalid model. `make` changes a copy of a good model and returns the value for --model;
    `cause` is a pattern of the message.
    """

    make: Callable[[Path], Path]
    cause: str


LFS_POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)
LLAMA, LATENT, GPT_OSS = "hf", "latent", "gpt_oss"  # folders of good models
GOOD = ("hf", "model.gguf", "latent", "latent.gguf", "gpt_oss", "gpt_oss.gguf")


def good_models(folder: Path) -> None:
    """Make the models from which the wrong ones are derived: directories and GGUF files."""
    write_tiny(folder / LLAMA, "llama")
    write_gguf(folder / LLAMA, folder / "model.gguf", "Q8_0")
    for name, arch in ((LATENT, "deepseek_v3"), (GPT_OSS, "gpt_oss")):
        write_tiny(folder / name, arch)
        write_gguf(folder / name, folder / f"{name}.gguf")


# --- directories


def directory(change: Callable[[Path], Any], base: str = LLAMA) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        change(folder / base)
        return folder / base

    return make


def text(name: str, content: str | bytes) -> Callable[[Path], Path]:
    data = content if isinstance(content, bytes) else content.encode()
    return directory(lambda path: (path / name).write_bytes(data))


def without(name: str) -> Callable[[Path], Path]:
    return directory(lambda path: (path / name).unlink())


def config(**changes: Any) -> Callable[[Path], Path]:
    return document("config.json", LLAMA, **changes)


def document(name: str, base: str, **changes: Any) -> Callable[[Path], Path]:
    """Change fields of a JSON file; None removes one."""

    def change(path: Path) -> None:
        held = json.loads((path / name).read_text()) | changes
        kept = {key: value for key, value in held.items() if value is not None}
        (path / name).write_text(json.dumps(kept))

    return directory(change, base)


def tensors(**changes: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Path], Path]:
    """Replace or remove tensors; names have __ for a dot. For a new name the change gets q_proj of
    layer 0.
    """

    def change(path: Path) -> None:
        held = load_file(path / "model.safetensors")
        for name, alter in changes.items():
            name = name.replace("__", ".")
            made = alter(held.pop(name, held["model.layers.0.self_attn.q_proj.weight"]))
            if made is not None:
                held[name] = made.contiguous()
        save_file(held, path / "model.safetensors")

    return directory(change)


def tensor(
    base: str, name: str, alter: Callable[[torch.Tensor], torch.Tensor | None]
) -> Callable[[Path], Path]:
    """Replace or remove one tensor of model `base`."""

    def change(path: Path) -> None:
        held = load_file(path / "model.safetensors")
        made = alter(held.pop(name))
        save_file(
            held if made is None else {**held, name: made.contiguous()}, path / "model.safetensors"
        )

    return directory(change, base)


def data(change: Callable[[bytes], bytes], name: str = "model.safetensors") -> Callable[..., Path]:
    def apply(path: Path) -> None:
        (path / name).write_bytes(change((path / name).read_bytes()))

    return directory(apply)


def header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], Path]:
    """Change the header of the safetensors file."""

    def apply(held: bytes) -> bytes:
        (size,) = struct.unpack_from("<Q", held)
        parsed = json.loads(held[8 : 8 + size])
        made = change(parsed)
        content = json.dumps(parsed if made is None else made).encode()
        return struct.pack("<Q", len(content)) + content + held[8 + size :]

    return data(apply)


def index(content: Any) -> Callable[[Path], Path]:
    return text("model.safetensors.index.json", json.dumps(content))


def quantized(method: str, **more: Any) -> Callable[[Path], Path]:
    return config(quantization_config={"quant_method": method, **more})


Q_PROJ, NORM = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"
METHODS = (
    "bitsandbytes",
    "aqlm",
    "eetq",
    "higgs",
    "hqq",
    "quanto",
    "quark",
    "spqr",
    "torchao",
    "vptq",
)


def _two_files(path: Path) -> None:
    shutil.copy(path / "model.safetensors", path / "b.safetensors")
    (path / "model.safetensors").rename(path / "a.safetensors")


def _pickled(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


DIRECTORIES = {
    "empty": WrongFile(
        directory(lambda path: [file.unlink() for file in path.iterdir()]), "no config.json"
    ),
    "no config": WrongFile(without("config.json"), "no config.json"),
    "weights are a pointer of git-lfs": WrongFile(
        text("model.safetensors", LFS_POINTER), "model.safetensors .*git lfs pull"
    ),
    "tokenizer is a pointer of git-lfs": WrongFile(
        text("tokenizer.json", LFS_POINTER), "tokenizer.json .*git lfs pull"
    ),
    "adapter": WrongFile(
        directory(lambda path: (path / "config.json").rename(path / "adapter_config.json")),
        r"is an adapter \(LoRA\)",
    ),
    "config is no JSON": WrongFile(text("config.json", "{"), "config.json is not JSON"),
    "config is no text": WrongFile(text("config.json", b"\xff\xfe\x00"), "config.json is not JSON"),
    "config is a list": WrongFile(text("config.json", "[]"), "config.json is not a JSON object"),
    "config is empty": WrongFile(text("config.json", "{}"), "unknown architecture"),
    "config nests": WrongFile(text("config.json", "[" * 100_000), "config.json is not JSON"),
    "architecture": WrongFile(config(architectures=["MambaForCausalLM"]), "MambaForCausalLM"),
    "no architecture": WrongFile(config(architectures=None), "unknown architecture"),
    "hidden size is text": WrongFile(config(hidden_size="x"), "hidden_size='x'"),
    "hidden size is 0": WrongFile(config(hidden_size=0), "hidden_size=0"),
    "hidden size is huge": WrongFile(config(hidden_size=1 << 40), "hidden_size"),
    "other hidden size": WrongFile(config(hidden_size=64), r"is \[.*\]; the config says"),
    "no layers": WrongFile(config(num_hidden_layers=0), "num_hidden_layers=0"),
    "layers without end": WrongFile(config(num_hidden_layers=10**6), "num_hidden_layers"),
    "more layers": WrongFile(config(num_hidden_layers=4), "missing 9 tensors: model.layers.3"),
    "fewer layers": WrongFile(config(num_hidden_layers=2), "unexpected 9 tensors: model.layers.2"),
    "heads": WrongFile(config(num_attention_heads=5), "5 heads are not a multiple of 2"),
    "vocabulary": WrongFile(config(vocab_size=300), r"config says \[300, 48\]"),
    "activation": WrongFile(config(hidden_act="relu6"), "activation 'relu6'"),
    "rope": WrongFile(config(rope_parameters={"rope_type": "spiral"}), "rope scaling 'spiral'"),
    "theta": WrongFile(config(rope_parameters={"rope_theta": 0.5}), "rope_theta=0.5"),
    "eps": WrongFile(config(rms_norm_eps=1e300), "rms_norm_eps=1e.300"),
    "context": WrongFile(config(max_position_embeddings=-1), "max_position_embeddings=-1"),
    **{name: WrongFile(quantized(name), f"'{name}' is not supported") for name in METHODS},
    "mlx": WrongFile(config(quantization={"bits": 4, "group_size": 64}), "'mlx' is not supported"),
    "unnamed method": WrongFile(config(quantization_config={"bits": 4}), "an unnamed method"),
    "gptq of 3 bits": WrongFile(quantized("gptq", bits=3, group_size=32), "gptq: bits is 3"),
    "gptq without weights": WrongFile(
        quantized("gptq", bits=4, group_size=32), "but no weight uses it"
    ),
    "awq of rows": WrongFile(quantized("awq", bits=4, version="gemv"), "awq: version is 'gemv'"),
    "fp8 of e5m2": WrongFile(quantized("fp8", fmt="e5m2"), "fp8: fmt is 'e5m2'"),
    "no weights": WrongFile(without("model.safetensors"), "expected one .* file, found none"),
    "pickled weights": WrongFile(directory(_pickled), "expected one .* file, found none"),
    "two files": WrongFile(directory(_two_files), "several without model.safetensors.index.json"),
    "index is no JSON": WrongFile(text("model.safetensors.index.json", "{"), "index.json"),
    "index is empty": WrongFile(index({}), "has no weight_map"),
    "index leads outside": WrongFile(index({"weight_map": {"a": "../b"}}), "outside its folder"),
    "lost shard": WrongFile(index({"weight_map": {"a": "b.safetensors"}}), "lacks 1 shards: b"),
    "index is wrong": WrongFile(
        index({"weight_map": {"a": "model.safetensors"}}), "lacks tensors that .* names: a"
    ),
    "nothing in the file": WrongFile(data(lambda held: b""), "cannot mmap an empty file"),
    "seven bytes": WrongFile(data(lambda held: held[:7]), "too short for a header"),
    "cut header": WrongFile(data(lambda held: held[:100]), "header has .* bytes and the file 100;"),
    "cut data": WrongFile(
        data(lambda held: held[:-10]), "the file has 335798 after its header: is it truncated"
    ),
    "bytes too many": WrongFile(
        data(lambda held: held + b"x"),
        "tensors take 335808 bytes, the file has 335809 after its header$",
    ),
    "huge header": WrongFile(
        data(lambda held: b"\xff" * 8 + held[8:]), "header has 18446744073709551615 bytes"
    ),
    "header is no JSON": WrongFile(
        data(lambda held: held[:8] + b"x" + held[9:]), "header is not JSON"
    ),
    "header is a list": WrongFile(header(lambda held: []), "header is not a JSON object"),
    "dtype": WrongFile(header(lambda held: held[NORM].update(dtype="F3")), "unknown dtype 'F3'"),
    "shape": WrongFile(
        header(lambda held: held[NORM].update(shape=[49])), f"{NORM} needs 196 bytes and has 192"
    ),
    "negative shape": WrongFile(
        header(lambda held: held[NORM].update(shape=[-48])), f"{NORM} has a malformed shape"
    ),
    "offsets": WrongFile(
        header(lambda held: held[NORM].update(data_offsets=[0, 4])),
        f"{NORM} needs 192 bytes and has 4",
    ),
    "integers": WrongFile(
        tensors(model__norm__weight=lambda t: t.to(torch.int32)), f"{NORM} is I32"
    ),
    "lost tensor": WrongFile(
        tensors(model__norm__weight=lambda t: None), f"missing 1 tensors: {NORM}"
    ),
    "more tensors": WrongFile(
        tensors(model__more__weight=lambda t: t.clone()), "unexpected 1 tensors: model.more.weight"
    ),
    "bias without need": WrongFile(
        tensors(model__layers__0__self_attn__q_proj__bias=lambda t: t[:, 0].clone()),
        "unexpected 1 tensors: .*q_proj.bias",
    ),
    "tensor of another shape": WrongFile(
        tensors(model__norm__weight=lambda t: t[:40]), rf"{NORM} is \[40\]; the config says \[48\]"
    ),
    "no tokenizer": WrongFile(without("tokenizer.json"), "has no tokenizer.json"),
    "tokenizer is no JSON": WrongFile(text("tokenizer.json", "{"), "tokenizer.json cannot be used"),
    "tokenizer config is a list": WrongFile(
        text("tokenizer_config.json", "[]"), "tokenizer_config.json is not a JSON object"
    ),
    "generation config is no JSON": WrongFile(
        text("generation_config.json", "{"), "generation_config.json is not JSON"
    ),
}

# --- GGUF files


def gguf_bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = folder / "model.gguf"
        path.write_bytes(change(path.read_bytes()))
        return path

    return make


def rewritten(
    keys: Callable[[dict[str, Any]], Any] = lambda keys: None,
    tensors: Callable[[dict[str, Any]], Any] = lambda tensors: None,
    name: str = "model.gguf",
    base: str = "model.gguf",
) -> Callable[[Path], Path]:
    """Write the file with other metadata or tensors; a key that is changed to None is left out."""

    def make(folder: Path) -> Path:
        reader = gguf.GGUFReader(folder / base)
        fields = {key: f for key, f in reader.fields.items() if not key.startswith("GGUF.")}
        values = {key: field.contents() for key, field in fields.items()}
        held = {tensor.name: (tensor.data, tensor.tensor_type) for tensor in reader.tensors}
        before = dict(values)
        keys(values)
        tensors(held)
        writer = gguf.GGUFWriter(folder / "made" / name, "llama")
        (folder / "made").mkdir()
        writer.kv_data[0].clear()  # the architecture, which it has written itself
        for key, value in values.items():
            if value is None:
                continue
            if key in fields and value == before.get(key):
                kind, *inner = fields[key].types
                sub_type = inner[-1] if inner else None
                writer.add_key_value(key, value, kind, sub_type)
            else:
                writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
        for tensor, (blocks, kind) in held.items():
            writer.add_tensor(tensor, blocks, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return folder / "made" / name

    return make


def keys(**changes: Any) -> Callable[[Path], Path]:
    """Change keys; names have __ for a dot."""
    dotted = {key.replace("__", "."): value for key, value in changes.items()}
    return rewritten(lambda held: held.update(dotted))


def gguf_of(
    base: str, key: str = "", value: Any = None, **cut: Callable[[Any], Any]
) -> Callable[[Path], Path]:
    """Change the value of a key, or tensors of layer 1, of GGUF file `base`."""

    def change(held: dict[str, Any]) -> None:
        for stem, alter in cut.items():
            name = f"blk.1.{stem}.weight"
            held[name] = (alter(held[name][0]), held[name][1])

    return rewritten(
        lambda held: held.update({key: value} if key else {}), change, base=f"{base}.gguf"
    )


def patched(at: int, value: bytes) -> Callable[[Path], Path]:
    return gguf_bytes(lambda held: held[:at] + value + held[at + len(value) :])


def _short_norm(held: dict[str, Any]) -> None:
    held["output_norm.weight"] = (
        held["output_norm.weight"][0][:40],
        held["output_norm.weight"][1],
    )


GGUF_FILES = {
    "gguf: nothing": WrongFile(gguf_bytes(lambda held: b""), "cannot mmap an empty file"),
    "gguf: another kind of file": WrongFile(gguf_bytes(lambda held: b"PK\3\4" + held), "GGUF"),
    "gguf: text": WrongFile(gguf_bytes(lambda held: b"hello, world\n" * 99), "GGUF"),
    "gguf: pointer of git-lfs": WrongFile(gguf_bytes(lambda held: LFS_POINTER), "git lfs pull"),
    "gguf: version 1": WrongFile(patched(4, struct.pack("<I", 1)), "version"),
    "gguf: big endian": WrongFile(patched(4, struct.pack(">I", 3)), "version|endian"),
    "gguf: tensors without end": WrongFile(patched(8, b"\xff" * 8), "tensors do not fit into"),
    "gguf: keys without end": WrongFile(patched(16, b"\xff" * 8), "metadata keys do not fit into"),
    "gguf: a long key": WrongFile(patched(24, b"\xff" * 8), "bytes of text do not fit into"),
    "gguf: cut in the head": WrongFile(
        gguf_bytes(lambda held: held[:20]), "30 tensors do not fit into the remaining 4 bytes"
    ),
    "gguf: cut in the metadata": WrongFile(
        gguf_bytes(lambda held: held[:3000]), "past the end of the file"
    ),
    "gguf: cut in the data": WrongFile(gguf_bytes(lambda held: held[:-4000]), "file truncated"),
    "gguf: no architecture": WrongFile(keys(general__architecture=None), "general.architecture"),
    "gguf: architecture": WrongFile(
        keys(general__architecture="mamba"), "unknown GGUF architecture 'mamba'"
    ),
    "gguf: architecture is a number": WrongFile(keys(general__architecture=5), "architecture"),
    "gguf: no number of layers": WrongFile(keys(llama__block_count=None), "llama.block_count"),
    "gguf: no context": WrongFile(keys(llama__context_length=None), "llama.context_length"),
    "gguf: no heads": WrongFile(keys(llama__attention__head_count=None), "head_count"),
    "gguf: size is text": WrongFile(keys(llama__embedding_length="x"), "embedding_length"),
    "gguf: more layers": WrongFile(keys(llama__block_count=4), "missing 9 tensors"),
    "gguf: scale of scores": WrongFile(keys(llama__attention__scale=0.5), "llama.attention.scale"),
    "gguf: window": WrongFile(keys(llama__attention__sliding_window=16), "sliding_window"),
    "gguf: cap of scores": WrongFile(
        keys(llama__attn_logit_softcapping=30.0), "attn_logit_softcapping"
    ),
    "gguf: scale of logits": WrongFile(keys(llama__logit_scale=2.0), "logit_scale"),
    "gguf: an unknown key": WrongFile(keys(llama__spiral=1), "llama.spiral"),
    "gguf: rope": WrongFile(keys(llama__rope__scaling__type="spiral"), "spiral|scaling.factor"),
    "gguf: values of other dims": WrongFile(
        keys(llama__attention__value_length=9), "values have 9 dims"
    ),
    "gguf: no tokens": WrongFile(keys(tokenizer__ggml__tokens=None), "tokenizer.ggml.tokens"),
    "gguf: tokenizer": WrongFile(keys(tokenizer__ggml__model="t5x"), "t5x"),
    "gguf: pre-tokenizer": WrongFile(keys(tokenizer__ggml__pre="spiral"), "spiral"),
    "gguf: types of few tokens": WrongFile(
        keys(tokenizer__ggml__token_type=[1, 2]), "token_type|metadata is malformed"
    ),
    "gguf: no embedding": WrongFile(
        rewritten(tensors=lambda held: held.pop("token_embd.weight")), "token_embd.weight"
    ),
    "gguf: lost tensor": WrongFile(
        rewritten(tensors=lambda held: held.pop("output_norm.weight")), "missing 1 tensors"
    ),
    "gguf: an unknown tensor": WrongFile(
        rewritten(tensors=lambda held: held.update(more=held["output_norm.weight"])), "tensor more"
    ),
    "gguf: shape": WrongFile(rewritten(tensors=_short_norm), r"is \[40\]; the config says \[48\]"),
    "gguf: lost part": WrongFile(
        rewritten(name="model-00001-of-00003.gguf"), "2 of 3 parts are missing"
    ),
}


# --- latent attention and gpt-oss: their matrices are split by sizes in the config


def sized(base: str, **changes: Any) -> Callable[[Path], Path]:
    return document("config.json", base, **changes)


AT = "model.layers.1.self_attn."
EXPERTS = "model.layers.1.mlp.experts."
LATENTS = {
    "latent: dims without rope without end": WrongFile(
        sized(LATENT, qk_nope_head_dim=1 << 30),
        r"kv_b_proj.weight is \[102, 24\]; the config says 3 h",
    ),
    "latent: dims without rope": WrongFile(
        sized(LATENT, qk_nope_head_dim=17), "kv_b_proj.weight .* config says 3 heads of 35 rows"
    ),
    "latent: a latent part without end": WrongFile(
        sized(LATENT, kv_lora_rank=1 << 28),
        r"config says \[3, 268435456, 16\]",
    ),
    "latent: a longer latent part": WrongFile(
        sized(LATENT, kv_lora_rank=25),
        r"k_b_proj.weight is \[3, 24, 16\]; the config says \[3, 25, 16\]",
    ),
    "latent: values": WrongFile(sized(LATENT, v_head_dim=20), "3 heads of 36 rows"),
    "latent: a rank of queries": WrongFile(sized(LATENT, q_lora_rank=21), r"config says \[21\]"),
    "latent: queries in one": WrongFile(
        sized(LATENT, q_lora_rank=None), "missing .*self_attn.q_proj.weight"
    ),
    "latent: odd rope": WrongFile(sized(LATENT, qk_rope_head_dim=7), "rope over 7"),
    "latent: more heads": WrongFile(sized(LATENT, num_attention_heads=6), "config says 6 heads of"),
    "latent: more experts": WrongFile(sized(LATENT, n_routed_experts=12), "missing 24 tensors"),
    "latent: groups": WrongFile(
        sized(LATENT, n_group=3), "8 experts cannot be split into 3 groups"
    ),
    "latent: no dense layer": WrongFile(
        sized(LATENT, first_k_dense_replace=0), "missing .*mlp.experts.0"
    ),
    "latent: rows of queries": WrongFile(
        tensor(LATENT, f"{AT}q_b_proj.weight", lambda t: t[:-1]),
        f"{AT}q_b_proj.weight .* config says 3 heads of 28 rows",
    ),
    "latent: rows of keys and values": WrongFile(
        tensor(LATENT, f"{AT}kv_b_proj.weight", lambda t: torch.cat((t, t[:3]))),
        f"{AT}kv_b_proj.weight .* config says 3 heads of 34 rows",
    ),
    "latent: no keys and values": WrongFile(
        tensor(LATENT, f"{AT}kv_b_proj.weight", lambda t: None), "missing 2 tensors: .*k_b_proj"
    ),
    "latent gguf: the latent part": WrongFile(
        gguf_of(LATENT, "deepseek2.attention.kv_lora_rank", 32), r"config says \[3, 32, 16\]"
    ),
    "latent gguf: keys": WrongFile(
        gguf_of(LATENT, "deepseek2.attention.key_length_mla", 30), "config says"
    ),
    "latent gguf: a negative size": WrongFile(
        gguf_of(LATENT, "deepseek2.attention.key_length_mla", 5), "qk_nope_head_dim=-7"
    ),
    "latent gguf: experts": WrongFile(
        gguf_of(LATENT, "deepseek2.expert_count", 12), "config says 12 matrices"
    ),
    "latent gguf: values": WrongFile(
        gguf_of(LATENT, attn_v_b=lambda blocks: blocks[:2]),
        f"{AT}v_b_proj.weight is .*; the config says .3, 18, 24.",
    ),
    "latent gguf: no rank": WrongFile(
        gguf_of(LATENT, "deepseek2.attention.kv_lora_rank", None),
        "kv_lora_rank|values have 24 dims",
    ),
    "latent gguf: layers behind": WrongFile(
        gguf_of(LATENT, "deepseek2.nextn_predict_layers", 3), "num_hidden_layers=0"
    ),
}
GPT_OSSES = {
    "gpt-oss: more experts": WrongFile(
        sized(GPT_OSS, num_local_experts=6), "config says 6 matrices|config says .6, 48."
    ),
    "gpt-oss: experts of a token": WrongFile(
        sized(GPT_OSS, num_experts_per_tok=9), "num_experts_per_tok=9"
    ),
    "gpt-oss: the size of experts": WrongFile(
        sized(GPT_OSS, intermediate_size=80), r"experts.0.*; the config says \[.*80.*\]"
    ),
    "gpt-oss: another gate": WrongFile(
        sized(GPT_OSS, swiglu_limit=3.0), "swiglu_limit=3.0: expected 7"
    ),
    "gpt-oss: head dims": WrongFile(sized(GPT_OSS, head_dim=22), "config says"),
    "gpt-oss: heads without end": WrongFile(
        sized(GPT_OSS, num_attention_heads=1 << 30), "config says"
    ),
    "gpt-oss: a short gate": WrongFile(
        tensor(GPT_OSS, f"{EXPERTS}gate_up_proj", lambda t: t[:, :, :-2]),
        f"{EXPERTS}0.*_proj.weight is .71, 48.; the config says .72, 48.",
    ),
    "gpt-oss: fewer experts": WrongFile(
        tensor(GPT_OSS, f"{EXPERTS}down_proj", lambda t: t[:4]), "config says 5 matrices"
    ),
    "gpt-oss: a flat gate": WrongFile(
        tensor(GPT_OSS, f"{EXPERTS}gate_up_proj", lambda t: t[0]), "config says 5 matrices"
    ),
    "gpt-oss: sinks": WrongFile(
        tensor(GPT_OSS, f"{AT}sinks", lambda t: t[:2]),
        rf"{AT}sinks is \[2\]; the config says \[3\]",
    ),
    "gpt-oss: no sinks": WrongFile(
        tensor(GPT_OSS, f"{AT}sinks", lambda t: None), f"missing 1 tensors: {AT}sinks"
    ),
    "gpt-oss: a short bias": WrongFile(
        tensor(GPT_OSS, f"{EXPERTS}down_proj_bias", lambda t: t[:, 1:]),
        r"down_proj.bias is \[47\]; the config says \[48\]",
    ),
    "gpt-oss gguf: more experts": WrongFile(
        gguf_of(GPT_OSS, "gpt-oss.expert_count", 6), "config says 6 matrices|config says .6, 48."
    ),
    "gpt-oss gguf: a window of text": WrongFile(
        gguf_of(GPT_OSS, "gpt-oss.attention.sliding_window", "x"), "sliding_window='x'"
    ),
    "gpt-oss gguf: experts of another size": WrongFile(
        gguf_of(GPT_OSS, ffn_gate_exps=lambda blocks: blocks[:, :-1]),
        f"{EXPERTS}0.gate_proj.weight is .71, 48.; the config says .72, 48.",
    ),
    "gpt-oss gguf: scaling without a factor": WrongFile(
        gguf_of(GPT_OSS, "gpt-oss.rope.scaling.factor", None), "rope.scaling.factor is missing"
    ),
}
OTHERS = {
    "no such file": WrongFile(
        lambda folder: folder / "nowhere.gguf", "neither an existing GGUF file"
    ),
    "a file of another kind": WrongFile(
        lambda folder: folder / "hf" / "model.safetensors", "does not begin with .GGUF"
    ),
}
WRONG_FILES = DIRECTORIES | GGUF_FILES | LATENTS | GPT_OSSES | OTHERS
