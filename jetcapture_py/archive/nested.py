"""Lists, maps and structs put together from columns of what they hold: no Python object per nested value."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from itertools import chain
from typing import Any

import pyarrow as pa


def offsets_of(values: Sequence[Sized | None]) -> pa.Array:
    """Where each of `values` starts in the chain of all of them: int32, null for None, with the end appended."""
    offsets: list[int | None] = []
    end = 0
    for value in values:
        if value is None:
            offsets.append(None)
        else:
            offsets.append(end)
            end += len(value)
    offsets.append(end)
    return pa.array(offsets, pa.int32())


def flatten(values: Sequence[Sequence[Any] | None]) -> list[Any]:
    """The items of all lists among `values`, in order."""
    return list(chain.from_iterable(value for value in values if value is not None))


def struct_array(children: Sequence[pa.Array], of: pa.StructType, nulls: pa.Array) -> pa.Array:
    """Structs of the type `of` with the columns `children`; null where `nulls` (boolean) is true."""
    return pa.StructArray.from_arrays(list(children), fields=list(of), mask=nulls)
