"""`kizuki bench`: this package and its peers on one grid, in one process and one run.

cells.py      the grid and what each cell must reach     providers.py  kizuki and torch: who computes a cell
peers.py      onnxruntime, openvino, jax                 truth.py      float64 on sampled rows, before any timing
measure.py    groups of calls, in turn                   fresh.py      first calls and imports, in new processes
peak.py       what this processor can do at most         growth.py, point.py  time and memory as the text grows
rows.py       one result, as JSON                        table.py, plot.py    as a table, as a picture
job.py        what the command runs                      warmup.py     every kernel compiled into the cache

The peers are optional (`pip install kizuki[bench]`): nothing here is imported before it is used.
"""
