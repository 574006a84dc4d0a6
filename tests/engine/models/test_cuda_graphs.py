"""Which recorded graph is used for a step, and how the step is padded to it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from pdserve.engine.execution import Batch, GroupTable, UnreadTokens
from pdserve.engine.kv import KvSpec, LayerGroup
from pdserve.engine.models.cuda import row_counts
from pdserve.engine.models.cuda.decoder import DecodeGraphs, GraphShape, key_counts
from pdserve.engine.models.cuda.step import StepInputs

SPEC = KvSpec(16, (LayerGroup((0,), "full", 0, 1, 16, "bfloat16", 0, 1),))


class Noted:
    """A recorder that records no graph, only the inputs of each."""

    def __init__(self) -> None:
        self.inputs: dict[GraphShape, StepInputs] = {}
        self.ran: list[StepInputs] = []

    def launch(self, inputs: StepInputs) -> Tensor:
        self.last = inputs
        return torch.arange(len(inputs.token_ids)).float()

    def record(self, launch):  # type: ignore[no-untyped-def]
        result, inputs = launch(), self.last

        def replay() -> Tensor:
            self.ran.append(inputs)
            return result

        return replay


def graphs(max_rows: int = 5, context_len: int = 1000) -> tuple[DecodeGraphs, Noted]:
    noted = Noted()
    device = torch.device("cpu")
    return DecodeGraphs(noted.launch, noted, device, SPEC, max_rows, context_len), noted


def batch(*kv_lens: int, decode: bool = True) -> Batch:  # type: ignore[type-arg]
    count = len(kv_lens)
    width = -(-max(kv_lens) // 16)
    table = np.arange(1, 1 + count * width).reshape(count, width)
    positions = np.array(kv_lens) - 1
    return Batch(
        token_ids=np.arange(count) + 10,
        positions=positions,
        starts=tuple(range(count + 1)),
        kv_lens=kv_lens,
        num_decode_rows=count if decode else count - 1,
        groups=(GroupTable(table, positions + 100),),
        logit_tokens=np.arange(count),
    )


def test_sizes_of_recorded_graphs() -> None:
    assert row_counts(1) == [1]
    assert row_counts(17) == [1, 2, 4, 8, 16, 24]
    assert row_counts(256)[-5:] == [64, 96, 128, 192, 256]
    assert key_counts(100) == [100]
    assert key_counts(40_000) == [512, 2048, 8192, 32768, 40_000]


def test_the_smallest_graph_that_fits_a_step_is_used(subtests: pytest.Subtests) -> None:
    for kv_lens, shape in (
        ((3,), (1, 512)),
        ((512, 9), (2, 512)),
        ((9, 513, 2), (4, 1000)),
        ((1,) * 5, (8, 512)),
    ):
        with subtests.test(kv_lens=kv_lens, shape=shape):
            found, _ = graphs()
            assert found.shape_of(batch(*kv_lens)) == GraphShape(*shape)


def test_steps_that_fit_no_graph() -> None:
    found, _ = graphs()
    assert found.shape_of(batch(*(1,) * 9)) is None
    assert found.shape_of(batch(1001)) is None
    assert found.shape_of(batch(5, 6, decode=False)) is None


def test_padding_has_no_keys_and_writes_nothing() -> None:
    found, noted = graphs()
    step = batch(40, 7, 600)
    out = found.run(step, found.shape_of(step) or pytest.fail("no graph"))
    assert out.tolist() == [0, 1, 2]
    (inputs,) = noted.ran
    rows = inputs.groups[0].rows
    assert inputs.token_ids.tolist() == [10, 11, 12, 0]
    assert inputs.positions.tolist() == [39, 6, 599, 0]
    assert inputs.groups[0].slots.tolist() == [139, 106, 699, -1]
    assert rows.kv_lens.tolist() == [40, 7, 600, 0]
    assert rows.starts.tolist() == [0, 1, 2, 3, 4]
    assert rows.block_table.shape == (4, 63)  # covers 1,000 keys
    assert rows.block_table[2, :38].tolist() == list(range(77, 115))
    assert not rows.block_table[:, 38:].any()
    assert rows.max_kv_len == 1000
    assert inputs.outputs.tolist() == [0, 1, 2, 3]


def test_tokens_that_the_host_has_not_read_are_taken_from_the_device() -> None:
    found, noted = graphs()
    unread = UnreadTokens(torch.tensor([50, -1, 52, 53], dtype=torch.int32), np.array([3, 1, 0]))
    step = replace(batch(40, 7, 9), unread=unread)
    found.run(step, found.shape_of(step) or pytest.fail("no graph"))
    assert noted.ran[0].token_ids.tolist() == [53, 0, 50, 50]
