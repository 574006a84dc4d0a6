"""The model card as it travels: each fact of the loaded model in its own field."""

from dataclasses import replace

import pytest
from worker_kit import CARD

from pdserve.services.worker.card import model_card


class NoGroups:
    block_size = 16
    groups = ()


@pytest.mark.parametrize(
    ("bos_id", "adds_bos"), [(None, False), (0, False), (0, True), (7, False), (7, True)]
)
def test_having_a_bos_token_and_adding_it_are_two_facts(bos_id: int | None, adds_bos: bool) -> None:
    card = replace(CARD, bos_id=bos_id, adds_bos=adds_bos, eos_ids=(9, 2))
    message, _ = model_card(card, NoGroups(), b"", "")
    assert (message.has_bos, message.adds_bos) == (bos_id is not None, adds_bos)
    assert message.bos_id == (bos_id or 0)
    assert list(message.eos_ids) == [9, 2]  # the first one is the template's
