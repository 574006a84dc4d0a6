"""The text that `pdserve up` prints once it is ready."""

import json
import shlex

import pytest

from pdserve.cli.up.banner import FIRST_REQUESTS, Banner, local_url

URL = "http://127.0.0.1:18000"


def banner(task: str = "chat", url: str = URL, needs_key: bool = False) -> str:
    made = Banner(
        1.25, url, "127.0.0.1:40001", "127.0.0.1:40002", "SmolLM2-135M-Instruct", task, needs_key,
        "/home/user/.local/share/pdserve/gateway-0123456789ab-18000.db", "pdserve",
    )  # fmt: skip
    return made.text()


def curl_words(text: str) -> list[str]:
    """Return the words of the curl command as a shell would read them."""
    return shlex.split("curl " + text.partition("  curl ")[2].partition("\n\n")[0])


def test_each_kind_of_model_gets_a_request_that_it_can_answer(subtests: pytest.Subtests) -> None:
    for task, (route, rest) in FIRST_REQUESTS.items():
        with subtests.test(task):
            text = banner(task, needs_key=True)
            assert max(map(len, text.splitlines())) <= 80
            words = curl_words(text)
            assert words[1] == f"{URL}/v1/{route}"
            assert "Authorization: Bearer YOUR_KEY" in words
            assert json.loads(words[-1]) == {"model": "SmolLM2-135M-Instruct", **rest}
            assert ("chat page" in text) == ("pdserve chat" in text) == (task == "chat")
            assert ("no chat template" in text) == (task == "complete")


def test_the_default_address_is_not_repeated() -> None:
    assert "  pdserve chat\n" in banner(url="http://127.0.0.1:8000")
    assert f"  pdserve chat --url {URL}\n" in banner()


def test_addresses_can_be_opened_on_this_machine(subtests: pytest.Subtests) -> None:
    for listening, opened in (
        ("http://0.0.0.0:8000", "http://127.0.0.1:8000"),
        ("https://[::]:8000", "https://[::1]:8000"),
        ("http://[fe80::1]:8000", "http://[fe80::1]:8000"),
        ("http://example:8000", "http://example:8000"),
        ("0.0.0.0:8001", "127.0.0.1:8001"),
        ("10.1.2.3:8001", "10.1.2.3:8001"),
    ):
        with subtests.test(listening):
            assert local_url(listening) == opened
