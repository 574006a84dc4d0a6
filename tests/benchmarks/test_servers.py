"""The closed loop of the server rows against a server in the test."""

import asyncio
import json
from collections.abc import Callable

import pytest
from servers import Wave, closed_loop


def stream(prompt: int, completion: int, tokens: int = 3) -> bytes:
    usage = {"prompt_tokens": prompt, "completion_tokens": completion}
    events = [json.dumps({"choices": [{"text": "x"}], "usage": None})] * tokens
    events += [json.dumps({"choices": [], "usage": usage}), "[DONE]"]
    return b"".join(f"data: {event}\n\n".encode() for event in events)


class Server:
    """Give every request the same answer; count the requests open at once."""

    def __init__(self, answer: Callable[[dict[str, object]], bytes]) -> None:
        self._answer = answer
        self.open = self.most = self.count = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(x for x in head.split(b"\r\n") if x.lower().startswith(b"content-length"))
        body = json.loads(await reader.readexactly(int(length.split(b":")[1])))
        self.count += 1
        self.open += 1
        self.most = max(self.most, self.open)
        await asyncio.sleep(0.01)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + self._answer(body))
        await writer.drain()
        self.open -= 1
        writer.close()
        await writer.wait_closed()


def run(server: Server, requests: int, workers: int, num_spares: int = 0) -> Wave:
    async def both() -> Wave:
        listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
        async with listener:
            port = listener.sockets[0].getsockname()[1]
            prompts = [(i, 2, 3) for i in range(requests)]
            spares = [(i, 7, 3) for i in range(num_spares)]
            return await closed_loop(f"http://127.0.0.1:{port}", "m", prompts, 4, workers, spares)

    return asyncio.run(both())


def test_every_prompt_is_sent_once_by_the_given_number_of_workers() -> None:
    seen: list[object] = []

    def answer(body: dict[str, object]) -> bytes:
        seen.append(tuple(body["prompt"]))  # type: ignore[arg-type]
        assert body["max_tokens"] == 4
        assert body["ignore_eos"] is True
        return stream(3, 4)

    server = Server(answer)
    wave = run(server, requests=12, workers=4)
    assert sorted(seen) == [(i, 2, 3) for i in range(12)]
    assert server.most == 4
    assert wave.tokens_per_s == pytest.approx(12 * 4 / wave.wall_s)
    assert all(0 < s.ttft_s <= s.e2e_s <= wave.wall_s for s in wave.samples)
    assert 0.01 < wave.first_p50_s < wave.wall_s


def test_an_unrequested_length_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"lengths \{\(3, 5\)\}"):
        run(Server(lambda body: stream(3, 5)), 2, 2)


@pytest.mark.parametrize("answer", [b"", b"data: {}\n\n", stream(3, 4).replace(b"prompt", b"")])
def test_a_broken_stream_is_an_error(answer: bytes) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        run(Server(lambda body: answer), 1, 1)
    assert "a stream broke" in str(caught.value.exceptions[0])


def test_the_prompt_of_a_broken_stream_is_replaced_by_a_spare() -> None:
    seen = []

    def answer(body: dict[str, object]) -> bytes:
        seen.append(body["prompt"])
        return b"data: {}\n\n" if body["prompt"] in ([1, 2, 3], [0, 7, 3]) else stream(3, 4)

    wave = run(Server(answer), requests=3, workers=1, num_spares=2)
    assert seen == [[0, 2, 3], [1, 2, 3], [0, 7, 3], [1, 7, 3], [2, 2, 3]]
    assert (wave.failed, len(wave.samples)) == (2, 3)
