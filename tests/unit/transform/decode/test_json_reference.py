"""What the decoder makes of random payloads, well-formed or broken, is what the standard library makes of each."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from typing import Any

import hypothesis.strategies as st
from hypothesis import given, reject

from jetcapture_py.transform.decode.json_declared import ObjectDecoder
from tests.support.batches import Declared, batch_of, outcomes

COLUMNS = {
    "identity": Declared("int32"),
    "price": Declared("float64"),
    "name": Declared("string"),
    "flag": Declared("bool"),
    "created": Declared("timestamp"),
    "items": Declared("list<int64>"),
    "city": Declared("string", path="customer.city"),
}
STAMP = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:[0-5]\d)", re.ASCII | re.IGNORECASE)


def reference(payload: bytes) -> dict[str, Any] | None:
    """What `COLUMNS` should give for one payload, by the standard library."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(pairs) != len(dict(pairs)):
            reject()
        return dict(pairs)

    def constant(name: str) -> None:
        raise ValueError(name)

    try:
        document = json.loads(payload.decode(), parse_constant=constant, object_pairs_hook=unique)
        json.dumps(document, ensure_ascii=False).encode()  # refuses lone surrogates
        if not isinstance(document, dict):
            return None
        customer = document.get("customer")
        if type(customer) not in (dict, type(None)):
            return None
        found = {name: document.get(name) for name in COLUMNS if name != "city"} | {
            "city": (customer or {}).get("city")
        }
        return {name: None if value is None else _checked(name, value) for name, value in found.items()}
    except (ValueError, OverflowError):
        return None


def _checked(name: str, value: Any) -> Any:
    kind = type(value)
    if name == "price" and kind in (int, float) and abs(float(value)) != float("inf"):
        return float(value)
    if name == "created" and kind is str and STAMP.fullmatch(value):
        return datetime.fromisoformat(value.upper()).astimezone(UTC)
    if name == "items" and kind is list and all(v is None or _is_int(v, 64) for v in value):
        return value
    if (name == "identity" and _is_int(value, 32)) or (name == "flag" and kind is bool):
        return value
    if name in ("name", "city") and kind is str:
        return value
    raise ValueError(name)


def _is_int(value: Any, bits: int) -> bool:
    return type(value) is int and -(2 ** (bits - 1)) <= value < 2 ** (bits - 1)


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.integers(-9, 9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.datetimes(timezones=st.just(UTC)).map(lambda at: at.isoformat())
)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner)
)
documents = st.fixed_dictionaries(
    {},
    optional={
        "identity": st.integers(-9, 9) | scalars,
        "price": st.floats(allow_nan=False, allow_infinity=False) | scalars,
        "name": st.text(max_size=8) | scalars,
        "flag": st.booleans() | scalars,
        "created": st.datetimes(timezones=st.just(UTC)).map(lambda at: at.isoformat()) | scalars,
        "items": st.lists(st.integers(-9, 9) | st.none(), max_size=4) | anything,
        "customer": st.fixed_dictionaries({}, optional={"city": st.text(max_size=5) | scalars}) | anything,
        "unknown field": anything,
    },
)


@st.composite
def payloads(draw: st.DrawFn) -> bytes:
    text = bytearray(json.dumps(draw(documents), ensure_ascii=draw(st.booleans())).encode(errors="surrogatepass"))
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 1, 2]))):
        at = draw(st.integers(0, len(text)))
        text[at : at + draw(st.integers(0, 2))] = draw(
            st.sampled_from([b"", b'"', b"{", b"}", b",", b"1", b"\xff", b" "])
        )
    return bytes(text)


@given(st.lists(payloads(), min_size=1, max_size=6))
def test_each_message_of_a_batch_gives_what_the_standard_library_makes_of_it_alone(batch: list[bytes]) -> None:
    expected = [reference(payload) for payload in batch]
    decoder = ObjectDecoder(COLUMNS)
    assert outcomes(decoder.decode(batch_of(batch)), len(batch)) == expected
    assert [outcomes(decoder.decode(batch_of([payload])), 1)[0] for payload in batch] == expected
