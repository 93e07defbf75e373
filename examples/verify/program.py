"""Runs steps that can be made longer by a known share. It needs no PyTorch, so it starts at once.

What the hooks do for a PyTorch program, it does itself: it times its steps, and waits for its turn behind each block.
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ["OPENBLAS_NUM_THREADS"] = "1"
import numpy as np

asked = json.loads(os.environ["NSYS_ANALYZE_ANNOTATION"])
turn = int(os.environ["NSYS_ANALYZE_TURN"])
products = round(100 * (1 + float(sys.argv[1])))  # of a step
weights = np.random.default_rng(0).normal(size=(64, 64)) / 8

times_ms = []
for step in range(asked["warmup_steps"] + asked["steps"]):
    measured = step - asked["warmup_steps"]
    if measured >= 0 and measured % asked["steps_per_turn"] == 0:
        os.write(turn, b".")
        os.read(turn, 1)
    begin = time.perf_counter()
    hidden = weights
    for _ in range(products):
        hidden = hidden @ weights
    times_ms.append((time.perf_counter() - begin) * 1e3)

results = {"times_ms": {"step": times_ms[asked["warmup_steps"] :]}}
Path(asked["results"]).write_text(json.dumps(results), encoding="utf-8")
