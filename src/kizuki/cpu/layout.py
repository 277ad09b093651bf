"""The argument block of the compiled kernels: named int64 slots, written in Python, read by address.

Every pointer is a byte address, every stride (`_ROW`, `_COL`) is in bytes. A `_TABLE` is the address of
an int64 array with one entry a plane (one batch entry and one query head).
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
    "FUSED",  # 1 = a task packs the one key block of its plane for itself, 2 = any key block when it comes to it
    # sizes
    "PLANES",
    "QUERIES",
    "KEYS",
    "HEAD_DIM",
    "VALUE_DIM",
    "KEY_BLOCKS",
    "KEY_WIDTH",  # columns of a key block that are in use, a multiple of nr and of four vectors
    "VALUE_PANELS",
    # how query and key, value, and output lie in memory: 0 as the kernel's type, 1 bfloat16, 2 float16
    "KIND",
    "VALUE_KIND",
    "OUT_KIND",
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
    # the mask: ranges of visible keys (int64), a boolean tensor, a bias in the kernel's type; 0 = none
    "FIRST_TABLE",
    "STOP_TABLE",
    "MASK_TABLE",
    "MASK_ROW",
    "MASK_COL",
    "BIAS_TABLE",
    "BIAS_ROW",
    "BIAS_COL",
    "SINK_TABLE",
    # functions compiled from the user's, called on a stretch of one row of scores; 0 = none
    "SCORE_FN",
    "MASK_FN",
    "FIRST_QUERY",  # the number of query 0 of this launch
    # dropout: 0 = none; the weights that stay are multiplied by KEEP_FACTOR
    "DROPOUT",
    "DROP_BELOW",
    "KEEP_FACTOR",
    "SEED",
    # float64 bits
    "SCALE",
    "SOFTCAP",  # 0 = none
    # the decoder: planes that share their keys and values, splits of the keys, what each split leaves behind
    "GROUP",
    "SPLITS",
    "PARTIAL",
    "PARTIAL_BYTES",
    "FINISHED",  # an int64 a unit: how many of its splits are done
    # a cache in pages: per plane a table of page numbers, 0 = none; keys a page; bytes from page to page
    "PAGES_TABLE",
    "PAGE_KEYS",
    "KEY_PAGE",
    "VALUE_PAGE",
    # the backward pass: the output's gradient, every operand packed a second way, what is summed up
    "GRAD_TABLE",
    "GRAD_ROW",
    "GRAD_COL",
    "GRAD_KIND",
    "GRAD_ODD",  # an int64 that becomes 1 where the gradient holds a NaN or an infinity
    "QUERY_BLOCKS",
    "QUERY_ROWS",  # scaled, [plane][query block][block_q][head_dim]
    "QUERY_COLUMNS",  # as it is, in panels of nr columns
    "GRAD_ROWS",
    "GRAD_COLUMNS",
    "KEY_COLUMNS",
    "VALUE_KEYS",  # values as KEY_PACKED has keys
    "DELTA_TABLE",
    "KEY_GROUPS",  # key blocks go to so many groups, round robin; each sums its own share of the query's gradient
    "D_QUERY",  # [plane][group][query block][panel][block_q][nr], 0 at first
    "D_KEY",  # [unit][key][head_dim]; 0 = not asked for
    "D_VALUE",
    "UNITS",
    "TOGETHER",  # 1 = one task takes all units, because they add to the same bias gradient
    "D_BIAS_TABLE",  # an address a plane and group; 0 = not asked for
    "D_BIAS_ROW",
    "D_BIAS_COL",
    # results, one contiguous block a plane: the output in the operands' type, and float64 for the lse
    "OUTPUT_TABLE",
    "LSE_TABLE",
    "GROUPS",  # tasks of a plane
    # readings folded into the forward pass: queries a block; where their working memory begins in the scratch
    "STEP",
    "WATCH_AT",
    "ROW_OFFSET",  # a query's own position less its number
    "MOMENTS",  # 1 = the entropy is asked for
    "REACHES",  # 1 = the distance is asked for
    "STATS_TABLE",  # four float64 a row: largest score, normaliser relative to it, entropy, distance
    "SCORES_TABLE",  # where to write the weights of keys SCORES_FROM … SCORES_TO; −inf at first; 0 = not asked for
    "SCORES_ROW",
    "SCORES_FROM",
    "SCORES_TO",
    "TOP_COUNT",  # the k largest weights of a row (its scores until it ends), and their keys, whole numbers as wide
    "TOP_SCORES_TABLE",
    "TOP_KEYS_TABLE",
    "COLUMNS",  # 1 = anything is summed over queries
    "RECEIVED",  # column sums of each plane and group; 0 = not asked for
    "POOL",  # float64 lines of pixels, POOL_LINES a plane: line = pixel row + number of the stretch + POOL_SHIFT
    "POOL_KIND",  # 0 = none, 1 = sums, 2 = largest weights
    "POOL_ROWS",
    "POOL_COLS",
    "POOL_LINES",
    "POOL_SHIFT",
    "ALL_QUERIES",
)

SLOT: Final = {name: 8 * place for place, name in enumerate(NAMES)}
