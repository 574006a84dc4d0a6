"""The flat batch of a plan matches its rows, token by token."""

from random import Random
from typing import Any

import numpy as np
from builders.engine_kit import ask

from pdserve.engine.execution import Batch, Ints, ModelRunner
from pdserve.engine.kv import KvSpec, LayerGroup, cache_seed
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.scheduling import Plan, RequestState, Row, Sequence

BLOCK, SLOTS, CONTEXT = 4, 12, 48
SPEC = KvSpec(
    BLOCK,
    (
        LayerGroup((0,), "full", 0, 1, 1, "float32", 0, 1),
        LayerGroup((1,), "window", 8, 1, 1, "float32", 0, 1),
    ),
)
NUM_BLOCKS = (200, 200)


class Recorder:
    """A model that keeps the batch."""

    batch: Batch[Ints]

    def forward(self, batch: Batch[Ints], kv: KvCache) -> Any:
        self.batch = batch
        return np.zeros((len(batch.logit_tokens), 1), np.float32)

    def logits(self, hidden: Any) -> Any:
        return hidden

    def states(self, hidden: Any) -> Any:
        return hidden


def sequence(rng: Random, slot: int, length: int) -> Sequence:
    job = RequestState(ask(str(slot), (1,), max_tokens=4), slot, 0.0, 4, cache_seed(b"", b""))
    made = Sequence(job, [rng.randrange(1000) for _ in range(length)], (0,), b"")
    made.slot = slot
    blocks = -(-length // BLOCK)
    made.block_tables = [rng.sample(range(1, count), blocks) for count in NUM_BLOCKS]
    made.rewritten_from = [0, 0]
    return made


def test_random_plans() -> None:
    rng = Random(1)
    model = Recorder()
    runner = ModelRunner(model, KvCache(SPEC, NUM_BLOCKS), SLOTS, CONTEXT)
    without_output = mixed = 0
    for _ in range(200):
        rows: list[Row] = []
        slots = rng.sample(range(SLOTS), rng.randint(1, SLOTS))
        num_decode_rows = rng.randint(0, len(slots))
        for number, slot in enumerate(slots):
            size = 1 if number < num_decode_rows else rng.randint(2, 12)
            end = rng.randint(size, CONTEXT)
            start = end - size
            first_output = rng.choice([start, end - 1, end])
            choices = (0,) if first_output < end else ()
            rows.append(Row(sequence(rng, slot, end), start, end, choices, first_output))
            without_output += size == 1 and first_output == end
        mixed += 0 < num_decode_rows < len(rows)
        hidden = runner.launch(Plan([], rows=rows, num_decode_rows=num_decode_rows))
        batch = model.batch
        tokens = [(row, at) for row in rows for at in range(row.start, row.end)]
        assert batch.token_ids.tolist() == [row.sequence.ids[at] for row, at in tokens]
        assert batch.positions.tolist() == [at for _, at in tokens]
        for group, table in enumerate(batch.groups):
            assert table.slots.tolist() == [
                row.sequence.block_tables[group][at // BLOCK] * BLOCK + at % BLOCK
                for row, at in tokens
            ]
            for line, row in zip(table.block_table.tolist(), rows, strict=True):
                blocks = row.sequence.block_tables[group]
                assert line == (blocks + [0] * len(line))[: len(line)]
        outputs = [i for i, (row, at) in enumerate(tokens) if at >= row.first_output]
        assert batch.logit_tokens.tolist() == outputs
        assert batch.kv_only == (not outputs) == (hidden is None)
        sizes = [row.num_tokens for row in rows]
        assert batch.starts == (0, *np.cumsum(sizes).tolist())
        assert batch.kv_lens == tuple(row.end for row in rows)
        assert batch.num_decode_rows == num_decode_rows
    assert without_output > 50
    assert mixed > 50
