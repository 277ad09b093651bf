"""Random problems against the brute force in float64: masks, options, dtypes, layouts, poison, forward and backward.

    python benchmarks/fuzz.py [--count 1000] [--start 0] [--seconds S] [--backends cpu,portable] [--largest 40]

Problem number N is always the same problem, so that a failure is seen again with `--start N --count 1`. One line a
failure, and a last line with the counts: failures, and problems that broke the rule of accuracy by luck (they are drawn
again with other numbers, see `problems.check`), by how far the worst of three drawings stands above it. The exit code
is 1 where anything failed. Nothing is timed.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from oracle import BACKENDS
from problems import check


def main() -> int:
    parser = argparse.ArgumentParser(description="Random problems against the brute force in float64.")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--start", type=int, default=0, help="the number of the first problem")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many")
    parser.add_argument("--backends", default=",".join(BACKENDS))
    parser.add_argument("--largest", type=int, default=40, help="queries and keys at most")
    args = parser.parse_args()
    torch.set_num_threads(1)
    end, failed, done, luck = time.monotonic() + args.seconds, 0, 0, list[float]()
    for number in range(args.start, args.start + args.count):
        if time.monotonic() > end:
            break
        for backend in args.backends.split(","):
            try:
                ratio = check(number, backend, args.largest)
                luck += [ratio] if ratio > 1 else []
            except Exception as error:  # noqa: BLE001 - whatever is raised is a failure of this problem, and is shown
                failed += 1
                line = " ".join(str(error).split())[:600]
                print(f"{number} {backend}: {type(error).__name__}: {line}", flush=True)
        done += 1
        if done % 1000 == 0:
            print(f"... {done} problems, {failed} failures", file=sys.stderr, flush=True)
    above = ", ".join(f"{sum(r > limit for r in luck)} above {limit} ×" for limit in (1, 2, 4))
    print(
        f"{done} problems ({args.start} to {args.start + done - 1}), {args.backends}: {failed} failures; "
        f"drawn again and passed: {above} what the rule allows over three drawings"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
