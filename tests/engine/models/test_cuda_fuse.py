"""Which parts of a layer are computed in one launch."""

from pathlib import Path

import pytest
from builders.paged_runner import read_config
from builders.tiny_models import write_tiny

from pdserve.engine.architectures import find_spec
from pdserve.engine.models import ModelConfig, layer_parts
from pdserve.engine.models.cuda.fuse import AddNorm, PrepareHeads, fused_parts
from pdserve.engine.models.parts import Add

LAYERS = {
    "qwen3": "Norm Linear PrepareHeads Attend SplitLinear AddNorm SplitLinear Gate SplitLinear"
    " AddNorm",
    "gemma2": "Norm Linear PrepareHeads Attend Linear Norm AddNorm SplitLinear Gate Linear Norm"
    " AddNorm",
    "olmo2": "Linear SliceNorm SliceNorm PrepareHeads Attend Linear Norm AddNorm SplitLinear Gate"
    " Linear Norm AddNorm",
    "phi": "LayerNorm Linear PrepareHeads Attend Linear Hold LayerNorm Linear Activate SplitLinear"
    " AddNorm",
    "granite": "Norm Linear PrepareHeads Attend SplitLinear AddNorm SplitLinear Gate SplitLinear"
    " AddNorm",
    "deepseek_v3": "Norm Linear SliceNorm HeadLinear SliceNorm PrepareHeads PrepareHeads HeadLinear"
    " PrepareHeads Attend HeadLinear SplitLinear AddNorm SplitLinear Gate SplitLinear AddNorm",
}


def config_of(arch: str, folder: Path) -> ModelConfig:
    config = read_config(write_tiny(folder, arch))
    return find_spec(config).parse(config)


def test_the_first_layer(
    subtests: pytest.Subtests, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for arch in LAYERS:
        with subtests.test(arch):
            tmp_path = tmp_path_factory.mktemp("case")
            kinds = [type(part).__name__ for part in fused_parts(config_of(arch, tmp_path))]
            expected = LAYERS[arch].split()
            assert kinds[: len(expected)] == expected


def test_fusing_keeps_all_tensors_stores_and_sums(
    subtests: pytest.Subtests, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Each tensor of the layers belongs to one part, and every layer stores and adds as before."""
    for arch in LAYERS:
        with subtests.test(arch):
            tmp_path = tmp_path_factory.mktemp("case")
            config = config_of(arch, tmp_path)
            plain = [part for n in range(config.num_layers) for part in layer_parts(config, n)]
            fused = fused_parts(config)
            wanted = [spec for part in plain for spec in part.tensors()]
            assert sorted(spec.name for part in fused for spec in part.tensors()) == sorted(
                spec.name for spec in wanted
            )
            sums = [part for part in fused if isinstance(part, AddNorm)]
            assert len(sums) == sum(isinstance(part, Add) for part in plain)
            stored = [part.layer for part in fused if isinstance(part, PrepareHeads)]
            assert [n for n in stored if n is not None] == list(range(config.num_layers))


def test_a_scale_is_fused_into_the_sum(tmp_path: Path) -> None:
    config = config_of("granite", tmp_path)
    sums = [part for part in fused_parts(config) if isinstance(part, AddNorm)]
    assert {part.factor for part in sums} == {0.75}
