"""The types of inferred columns in the archive, and what is logged about them."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from jetcapture_py.archive import layout
from jetcapture_py.archive.inferred import InferredColumns, path
from jetcapture_py.capture.inferred import InferredTypes
from jetcapture_py.capture.stats import Rescued
from jetcapture_py.config.model import SourceConfig
from jetcapture_py.log import FIELDS
from jetcapture_py.store import LocalStore
from jetcapture_py.transform.decode.json_inferred import InferringDecoder
from tests.support.batches import batch_of


def test_a_change_of_a_type_is_logged_once_though_no_message_follows(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "jetcapture.capture")
    store, decoder = LocalStore(str(tmp_path)), InferringDecoder()
    types = InferredTypes(store, SourceConfig(stream="S", consumer="c"), decoder)
    types.read()
    decoder.decode(batch_of([b'{"id": 1}']))
    other = InferredColumns(stream="S", consumer="c", types={"id": "string"}).encode()
    store.change_note(path("S", "c"), lambda _: other)  # another replica was first
    for _ in range(3):
        types.write()
        types.learn()
    assert [getattr(record, FIELDS) for record in caplog.records] == [
        {"column": "id", "was": "int64", "type": "string"}
    ]
    decoder.decode(batch_of([b'{"id": "a", "flag": "yes"}']))
    assert decoder.types == {"id": "string", "flag": "string"}
    caplog.clear()
    other = InferredColumns(stream="S", consumer="c", types={"id": "string", "flag": "bool"}).encode()
    store.change_note(path("S", "c"), lambda _: other)
    types.write()
    decoder.decode(batch_of([b'{"flag": "no"}']))  # still text
    types.learn()
    types.write()
    (logged,) = [getattr(record, FIELDS) for record in caplog.records]
    assert logged == {"column": "flag", "was": "string", "type": "bool"}


def test_a_large_rescued_value_is_logged_by_its_beginning(caplog: pytest.LogCaptureFixture) -> None:
    values = json.dumps({"id": "x" * 1_000_000, "n": 10**4000})
    rescued = Rescued()
    rescued.add(pa.RecordBatch.from_pydict({layout.SEQ: [7], layout.RESCUED: [values]}))
    id_, number = (getattr(record, FIELDS) for record in caplog.records)
    assert (id_["column"], number["column"]) == ("id", "n")
    assert id_["example"].startswith('id = "xxx')
    assert len(id_["example"]) < 100 > len(number["example"])
    deep = '{"x":' + "[" * 990 + "]" * 990 + "}"
    rescued.add(pa.RecordBatch.from_pydict({layout.SEQ: [8], layout.RESCUED: [deep]}))
    assert rescued.messages == 2
