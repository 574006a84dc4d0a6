"""Long id lists arrive whole and in order; a peer cannot make a collector grow without bound."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.protos import common_pb2 as pb
from pdserve.services.common.errors import ServiceError
from pdserve.services.common.rpc import IdsCollector, send_ids
from pdserve.services.common.rpc.channel import IDS_PER_MESSAGE


@given(st.lists(st.integers(0, 3 * IDS_PER_MESSAGE + 5), max_size=4), st.randoms())
@settings(max_examples=40)
def test_round_trip_of_interleaved_lists(lengths: list[int], random: object) -> None:
    collector = IdsCollector()
    lists = {f"r{i}": list(range(i, i + length)) for i, length in enumerate(lengths)}
    sent = {key: send_ids(key, ids) for key, ids in lists.items()}
    queues = [list(parts) for parts, _ in sent.values()]
    while any(queues):
        queue = random.choice([q for q in queues if q])  # type: ignore[attr-defined]
        part = queue.pop(0)
        assert part.ByteSize() < 256 << 10
        collector.add(part)
    for key, ids in lists.items():
        assert len(sent[key][1]) <= IDS_PER_MESSAGE
        assert collector.take(key, sent[key][1]) == ids
    assert collector.take("r0", []) == []


def test_largest_part_fits_a_message() -> None:
    parts, tail = send_ids("k" * 256, [2**32 - 1] * (IDS_PER_MESSAGE + 1))
    assert parts[0].ByteSize() < 256 << 10
    assert len(tail) == 1


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abcdef"),
            st.integers(0, 40),
            st.sampled_from(["add", "add", "add", "take", "drop"]),
        )
    )
)
def test_whole_or_refused_under_any_sequence(steps: list[tuple[str, int, str]]) -> None:
    collector = IdsCollector(max_ids=100, max_keys=4)
    model: dict[str, int | None] = {}  # None: refused
    flooded = False
    for key, count, what in steps:
        if what == "drop":
            collector.drop(key)
            model.pop(key, None)
        elif what == "take":
            whole = model.pop(key, 0)
            if whole is None or flooded:
                with pytest.raises(ServiceError):
                    collector.take(key, [1])
            else:
                assert collector.take(key, [1]) == [7] * whole + [1]
        else:
            held = sum(size or 0 for size in model.values())
            full = key not in model and len(model) >= 4
            known = model.get(key, 0)
            part = pb.IdsPart(key=key, ids=[7] * count)
            if full or known is None or not count or held + count > 100:
                flooded |= full
                if not full:
                    model[key] = None
                with pytest.raises(ServiceError):
                    collector.add(part)
            else:
                collector.add(part)
                model[key] = known + count


@given(st.binary(max_size=300))
def test_bytes_of_a_peer_are_parsed_or_refused_with_an_error(data: bytes) -> None:
    from google.protobuf.message import DecodeError

    try:
        part = pb.IdsPart.FromString(data)
    except DecodeError:
        return
    collector = IdsCollector(max_ids=10)
    try:
        collector.add(part)
    except ServiceError:
        with pytest.raises(ServiceError):
            collector.take(part.key, ())
