"""JSON bodies: what is parsed, and what is refused before it takes long."""

import pytest

from pdserve.gateway.http.body import MAX_VALUES, parse_object
from pdserve.services.host.errors import ServiceError


@pytest.mark.parametrize("item", [b"0", b'""', b"[]", b"{}", b'{"a":0}'])
def test_more_values_than_a_body_may_have_are_refused(item: bytes) -> None:
    body = b'{"tokens": [' + b",".join([item] * (MAX_VALUES + 1)) + b"]}"
    with pytest.raises(ServiceError, match=f"more than {MAX_VALUES} values"):
        parse_object(body)


def test_a_long_text_is_one_value() -> None:
    text = "so, and so, " * 40_000
    assert parse_object(b'{"prompt": "' + text.encode() + b'"}') == {"prompt": text}


def test_ids_of_the_longest_prompts_are_taken() -> None:
    body = b'{"prompt": [' + b",".join([b"7"] * (MAX_VALUES // 2)) + b"]}"
    assert len(parse_object(body)["prompt"]) == MAX_VALUES // 2
