"""The types of arrays about messages."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
Seqs = Int64s
"""Sequences."""
Micros = Int64s
"""Times in microseconds since the epoch."""
Nanos = Int64s
"""Times in nanoseconds since the epoch."""
Int32s = npt.NDArray[np.int32]
UInt32s = npt.NDArray[np.uint32]
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float64]
Hashes = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]
"""One boolean per element; True selects it."""
