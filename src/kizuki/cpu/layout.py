"""The argument block of the compiled kernels: named int64 slots, written in Python, read by address.

Every pointer is a byte address and every stride is in elements unless its name says bytes. A `_TABLE`
is the address of an int64 array with one entry a plane (one batch entry and one query head).
"""

from __future__ import annotations

from typing import Final

NAMES: Final = (
    # the task counter and the scratch counter: written by the kernel, atomically
    "NEXT_TASK",
    "NEXT_SLOT",
    "TASKS",
    "SCRATCH",
    "SCRATCH_BYTES",
    # sizes
    "PLANES",
    "QUERIES",
    "KEYS",
    "HEAD_DIM",
    "VALUE_DIM",
    "KEY_BLOCKS",
    "KEY_WIDTH",  # columns of a key block that are in use, a multiple of nr and of four vectors
    "VALUE_PANELS",
    # query: one address a plane
    "QUERY_TABLE",
    "QUERY_ROW",
    "QUERY_COL",
    # key and value: unique planes, packed once; the tables say which a query plane reads
    "KEY_PLANES",
    "KEY_SOURCE",
    "KEY_ROW",
    "KEY_COL",
    "KEY_PACKED",
    "KEY_TABLE",
    "VALUE_PLANES",
    "VALUE_SOURCE",
    "VALUE_ROW",
    "VALUE_COL",
    "VALUE_PACKED",
    "VALUE_TABLE",
    "VALUE_ODD",  # one byte a value plane and key block: does it hold a NaN or an infinity?
    # the mask: ranges of visible keys (int64), a boolean tensor, a float32 bias; 0 = none
    "FIRST_TABLE",
    "STOP_TABLE",
    "MASK_TABLE",
    "MASK_ROW",
    "MASK_COL",
    "BIAS_TABLE",
    "BIAS_ROW",
    "BIAS_COL",
    "SINK_TABLE",
    # float64 bits
    "SCALE",
    "SOFTCAP",  # 0 = none
    # results, one contiguous block a plane: float32, and float64 for the lse
    "OUTPUT_TABLE",
    "LSE_TABLE",
    # readings, given the lse: four floats a row; the k best of a row; column sums of each group of query blocks
    "ROW_OFFSET",
    "STATS_TABLE",
    "TOP_COUNT",
    "TOP_SCORES_TABLE",
    "TOP_KEYS_TABLE",
    "RECEIVED",
    "GROUPS",
)

SLOT: Final = {name: 8 * place for place, name in enumerate(NAMES)}
