"""Concurrent requests with equal long prompts: one is prefilled and transferred, and the others
share its blocks."""

import pytest
from builders.engine_kit import ask
from systems.eventually import wait_until
from systems.fleet import Fleet

from pdserve.protos import fleet_pb2

LENGTH, TOGETHER, BLOCK = 1_221, 6, 32


@pytest.mark.extended
def test_equal_prompts_cost_one_prefill_and_one_transfer() -> None:
    prompt = [(i * 37 + i * i) % 40_000 + 100 for i in range(LENGTH)]
    params = {"max_tokens": 8, "ignore_eos": True}
    options = ("--prefill", "1", "--decode", "1", "--kv-tokens", "4096", "--chunk-size", "64")
    with Fleet(*options, "--kv-transport", "tcp") as fleet:

        def loads() -> dict[int, fleet_pb2.Load]:
            return {w.hello.role: w.load for w in fleet.fleet_view().workers}

        together = fleet.generate([ask(f"r{n}", prompt, **params) for n in range(TOGETHER)])
        wait_until(lambda: loads()[fleet_pb2.DECODE].attached == TOGETHER - 1, "a report")
        wait_until(fleet.all_blocks_back, "blocks back")
        wait_until(lambda: loads()[fleet_pb2.PREFILL].prompt_tokens, "a report of prefill")
        decode, prefill = loads()[fleet_pb2.DECODE], loads()[fleet_pb2.PREFILL]
        assert prefill.prompt_tokens == LENGTH - 1
        assert decode.prompt_tokens == 1 + (TOGETHER - 1) * (LENGTH % BLOCK)
        assert (decode.following, decode.placed_again) == (0, 0)
        sent = sum(transport.bytes for transport in decode.transports)
        assert len(set(together.values())) == 1
        alone = fleet.generate([ask("alone", prompt, **params)])
        assert set(alone.values()) == set(together.values())
        other = [1, *prompt]
        fleet.generate([ask("other", other, **params)])
        wait_until(lambda: loads()[fleet_pb2.PREFILL].prompt_tokens == 2 * LENGTH - 1, "a report")

        def more() -> int:
            return sum(transport.bytes for transport in loads()[fleet_pb2.DECODE].transports) - sent

        expected = sent // -(-(LENGTH - 1) // BLOCK) * -(-LENGTH // BLOCK)
        wait_until(lambda: more() >= expected, "a report of decode")
        assert more() == expected
    assert fleet.exit_code == 0
