"""A client of the dispatcher that keeps and checks all its events."""

from collections import Counter

from pdserve.protos import common_pb2 as pb
from pdserve.protos.router_pb2 import RequestEvent
from pdserve.services.common.rpc import NumberedChoice

HITS: Counter[str] = Counter()  # how often each interesting state was reached


class Recorder:
    """A client that keeps everything."""

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.reads_rows = True
        self.ids: dict[tuple[str, int, int], list[int]] = {}
        self.terminal: Counter[tuple[str, int]] = Counter()

    def put(self, event: RequestEvent) -> None:
        kind = event.WhichOneof("event")
        message = getattr(event, kind)
        key = (message.request, message.epoch)
        assert not self.terminal[key], "an event after the terminal one"
        if kind == "tokens":
            have = self.ids.setdefault((*key, message.choice), [])
            assert message.position == len(have)
            have += message.ids
        elif kind in ("finished", "failed"):
            self.terminal[key] += 1
            HITS[kind if kind == "finished" else pb.ErrorCode.Name(message.failure.code)] += 1

    def put_token(self, choice: NumberedChoice, position: int, id_: int) -> bool:
        key = (choice.request, choice.epoch)
        assert not self.terminal[key], "a token after the terminal event"
        have = self.ids.setdefault((*key, choice.choice), [])
        assert position == len(have)
        have.append(id_)
        HITS["rows"] += 1
        return True
