"""Hugging Face directories: safetensors headers, shards and the files next to the weights."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pytest
import torch
from builders.tiny_models import write_tiny
from safetensors.torch import load_file, save_file

from pdserve.engine.checkpoints import CheckpointError
from pdserve.engine.checkpoints.hf import DirectoryCheckpoint
from pdserve.engine.checkpoints.hf.checkpoint import read_json
from pdserve.engine.checkpoints.hf.safetensors import SafetensorsReader
from pdserve.engine.checkpoints.source import Layout
from pdserve.engine.checkpoints.text import one_template
from pdserve.engine.load import open_checkpoint
from pdserve.engine.weights.convert import unpack


def write_header(path: Path, header: Any, data: bytes = b"") -> Path:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)
    return path


def entry(shape: list[Any], first: Any, last: Any, kind: Any = "F32") -> dict[str, Any]:
    return {"dtype": kind, "shape": shape, "data_offsets": [first, last]}


def test_tensors_equal_those_of_the_safetensors_package(
    subtests: pytest.Subtests, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for dtype, stored in (
        (torch.float32, "F32"),
        (torch.float16, "F16"),
        (torch.bfloat16, "BF16"),
        (torch.float64, "F64"),
    ):
        with subtests.test(dtype=dtype, stored=stored):
            tmp_path = tmp_path_factory.mktemp("case")
            path = tmp_path / "m.safetensors"
            tensors = {"a": torch.randn(3, 5).to(dtype), "b": torch.randn(7).to(dtype)}
            tensors["scalar"] = torch.tensor(2.5, dtype=dtype)
            save_file(tensors, path, metadata={"format": "pt"})
            reader = SafetensorsReader(path)
            assert set(reader.names()) == set(tensors)
            for name, expected in tensors.items():
                array = reader.array(name)
                assert array.shape == tuple(expected.shape)
                assert reader.layout(name) == Layout(stored, array.shape)
                assert array.tobytes() == expected.view(-1).view(torch.uint8).numpy().tobytes()


def test_tensors_are_views_and_cannot_change_the_file(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.ones(4)}, path)
    before = path.read_bytes()
    SafetensorsReader(path).array("a")[:] = 0
    assert path.read_bytes() == before


def test_unaligned_data_is_read(tmp_path: Path) -> None:
    values = torch.randn(4)
    header = json.dumps({"a": entry([4], 0, 16)}).encode()
    header += b" " * ((1 - len(header)) % 4)  # the data begin at an odd byte
    path = write_header(tmp_path / "m.safetensors", header, values.numpy().tobytes())
    assert SafetensorsReader(path).array("a").tolist() == values.tolist()


GOOD = entry([4], 0, 16)
BAD: dict[str, tuple[Any, int]] = {
    "not a JSON object": ([], 0),
    "not JSON ": (b"{", 0),
    "duplicate key": (b'{"a":{},"a":{}}', 0),
    "is not JSON": (b"[" * 200_000, 0),
    "is malformed": ({"a": 3}, 0),
    "unknown dtype 'F31'": ({"a": entry([4], 0, 16, "F31")}, 16),
    "unknown dtype None": ({"a": {"shape": [4], "data_offsets": [0, 16]}}, 16),
    "malformed shape": ({"a": entry([-4], 0, 16)}, 16),
    "a malformed shape": ({"a": entry([4.0], 0, 16)}, 16),
    "has a malformed shape": ({"a": entry([1] * 9, 0, 4)}, 4),
    "malformed data_offsets": ({"a": entry([4], -16, 0)}, 16),
    "has malformed data_offsets": ({"a": entry([4], True, 16)}, 16),
    "needs 16 bytes and has 12": ({"a": entry([4], 0, 12)}, 12),
    "needs 0 bytes and has -8": ({"a": entry([0], 8, 0)}, 8),
    "and has 0": ({"a": entry([2**40, 2**40], 0, 0)}, 0),
    "b begins at byte 8": ({"a": GOOD, "b": entry([4], 8, 24)}, 24),
    "begins at byte 4 of the data, expected 0": ({"a": entry([4], 4, 20)}, 20),
    "tensors take 16 bytes, the file has 12": ({"a": GOOD}, 12),
    "tensors take 16 bytes, the file has 20": ({"a": GOOD}, 20),
}


def test_an_invalid_header_is_refused(
    subtests: pytest.Subtests, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for message in BAD:
        with subtests.test(message):
            tmp_path = tmp_path_factory.mktemp("case")
            header, size = BAD[message]
            path = write_header(tmp_path / "m.safetensors", header, bytes(size))
            with pytest.raises(CheckpointError, match=message):
                SafetensorsReader(path)


def test_a_file_that_is_too_short_is_refused(
    subtests: pytest.Subtests, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for data in (b"", b"1234567", (2**63).to_bytes(8, "little") + bytes(9)):
        with subtests.test(data=data):
            tmp_path = tmp_path_factory.mktemp("case")
            path = tmp_path / "m.safetensors"
            path.write_bytes(data)
            with pytest.raises(CheckpointError, match=r"cannot read|too short|the header has"):
                SafetensorsReader(path)


def test_integer_tensors_are_not_weights(tmp_path: Path) -> None:
    write_header(tmp_path / "m.safetensors", {"a": entry([2], 0, 16, "I64")}, bytes(16))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="a is I64"):
        DirectoryCheckpoint(tmp_path).tensor("a")


def test_sharded_equals_single(tmp_path: Path) -> None:
    one = write_tiny(tmp_path / "one", "llama")
    many = write_tiny(tmp_path / "many", "llama", max_shard_size="40KB")
    a, b = DirectoryCheckpoint(one), DirectoryCheckpoint(many)
    assert len(a.files) == 1
    assert len(b.files) > 2
    assert set(a.names()) == set(b.names())
    assert all(np.array_equal(unpack(a.tensor(name)), unpack(b.tensor(name))) for name in a.names())


def sharded(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "many", "llama", max_shard_size="40KB")


def test_missing_shard_is_named(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"lacks 1 shards: {shard.name}"):
        DirectoryCheckpoint(folder)


def test_an_index_that_names_other_files_is_refused(tmp_path: Path) -> None:
    folder = sharded(tmp_path)
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    name = next(iter(weight_map))
    index.write_text(json.dumps({"weight_map": {**weight_map, name: "../../secret"}}))
    with pytest.raises(CheckpointError, match="outside its folder"):
        DirectoryCheckpoint(folder)
    shard = weight_map[name]
    index.write_text(json.dumps({"weight_map": {**weight_map, "model.extra": shard}}))
    with pytest.raises(CheckpointError, match=r"lacks tensors that .* names: model\.extra"):
        DirectoryCheckpoint(folder)


def test_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"one \*\.safetensors file, found none"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="not a JSON object"):
        open_checkpoint(tmp_path)


def test_unknown_name_gets_a_hint(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_tiny(tmp_path, "llama"))
    with pytest.raises(CheckpointError, match=r"similar names: model\.norm\.weight"):
        checkpoint.tensor("model.norms.weight")


def test_eos_ids_are_the_union_and_begin_with_that_of_the_tokenizer(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "llama", eos_token_id=3)
    generation = {"eos_token_id": [5, 4, -1, 10**6, True], "temperature": 0.5}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    text = open_checkpoint(folder).text_files()
    assert text.eos_ids == (258, 5, 4, 3)  # 258 is from tokenizer_config.json
    assert text.generation_config == generation
    assert (text.bos_id, text.adds_bos) == (256, True)


def test_places_of_the_chat_template(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "llama")
    for file in ("chat_template.jinja", "tokenizer_config.json"):
        (folder / file).unlink(missing_ok=True)
    assert open_checkpoint(folder).text_files().chat_template == ""
    names = ([], "tool_use", "default")
    several = [{"name": name, "template": str(name)[:1].upper()} for name in names]
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps({"chat_template": several}))
    template = open_checkpoint(folder).text_files().chat_template
    assert template == one_template({"default": "D", "tool_use": "T"})
    settings.write_text(json.dumps({"chat_template": "S"}))
    assert open_checkpoint(folder).text_files().chat_template == "S"
    (folder / "chat_template.jinja").write_text("J")
    assert open_checkpoint(folder).text_files().chat_template == "J"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("T")
    template = open_checkpoint(folder).text_files().chat_template
    assert template == one_template({"default": "J", "tool_use": "T"})


def test_special_tokens_have_the_names_in_the_settings(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "llama")
    settings = folder / "tokenizer_config.json"
    names = ("bos_token", "pad_token", "unk_token", "image_token", "tool_token", "sep_token")
    (folder / "chat_template.jinja").write_text("".join(f"{{{{ {name} }}}}|" for name in names))
    given = {
        "bos_token": None,
        "pad_token": '<p"\\é😀{%>',
        "unk_token": {"content": "<u>"},
        "image_token": "<i>",
        "extra_special_tokens": {"tool_token": "<t>"},
        "mask_token": "<m>",
        "add_bos_token": True,
    }
    settings.write_text(json.dumps(given))
    template = open_checkpoint(folder).text_files().chat_template
    assert jinja2.Template(template).render(bos_token="<b>") == '|<p"\\é😀{%>|<u>|<i>|<t>||'
    assert "mask_token" not in template


def test_several_chat_templates_become_one(subtests: pytest.Subtests) -> None:
    """The template is chosen as in transformers, and each keeps its whitespace options."""
    sources = (
        "\n  a{% if x %}\n  b\n  {%- endif %}\n  ",
        "{% macro m() %}M{% endmacro %}{{ m() }}\n",
        "",
    )
    options = {"trim_blocks": True, "lstrip_blocks": True}
    for default, tool_use in product(sources, sources):
        with subtests.test(default=default, tool_use=tool_use):
            both = one_template({"rag": "R", "default": default, "tool_use": tool_use})
            for tools, alone in ((None, default), ([1], tool_use)):
                expected = jinja2.Template(alone, **options).render(x=1)
                assert jinja2.Template(both, **options).render(x=1, tools=tools) == expected
    assert one_template({"rag": "R", "other": "O"}) == "R"
    assert one_template({}) == ""


def test_a_tokenizer_is_required_and_checked(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "llama")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot be used"):
        open_checkpoint(folder).text_files()
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        open_checkpoint(folder).text_files()


def test_a_second_copy_of_the_weights_is_refused(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "llama")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors, folder / "adapter.safetensors")
    assert len(open_checkpoint(folder).files) == 1
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    with pytest.raises(CheckpointError, match="several without"):
        open_checkpoint(folder)


def test_refuses_a_configuration_that_would_take_all_memory(tmp_path: Path) -> None:
    """Eleven MiB of brackets took 301 MiB when parsed."""
    (tmp_path / "config.json").write_text('{"x": [' + "[]," * (11 << 18) + "0]}")
    with pytest.raises(CheckpointError, match="is larger than"):
        read_json(tmp_path / "config.json")


def test_an_unsupported_quantization_method_is_named_in_the_error(
    subtests: pytest.Subtests, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for added, named in (
        (
            {"quantization_config": {"quant_method": "bitsandbytes"}},
            "quantization method 'bitsandbytes'",
        ),
        ({"quantization_config": {}}, "quantization method 'an unnamed method'"),
        ({"quantization_config": 7}, "quantization method 7"),
        ({"quantization": {"group_size": 64, "bits": 4}}, "quantization method 'mlx'"),
        (
            {"quantization": {"bits": 4}, "quantization_config": {"bits": 4}},
            "quantization method 'mlx'",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, "but no weight uses it"),
        ({"quantization_config": {"quant_method": "gptq", "bits": [4]}}, "of gptq: bits is"),
    ):
        with subtests.test(named):
            tmp_path = tmp_path_factory.mktemp("case")
            write_tiny(tmp_path, "llama")
            config = read_json(tmp_path / "config.json")
            (tmp_path / "config.json").write_text(
                json.dumps(config | {"quantization_config": None})
            )
            open_checkpoint(tmp_path)
            (tmp_path / "config.json").write_text(json.dumps(config | added))
            with pytest.raises(CheckpointError, match=f"{tmp_path.name}.* {named}"):
                open_checkpoint(tmp_path)
