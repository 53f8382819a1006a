"""What recording a timeline costs: microseconds that one layer's exchange on one lane takes, untouched and recorded, in turns.

    .venv/bin/python benchmarks/trace_overhead.py

One rank alone, whose exchange does next to nothing, so that the difference shows.
"""

from __future__ import annotations

import json
import statistics
import time

import torch

from ep.backends.local import LocalAllToAll
from ep.instrumented import recorded
from ep.protocol import AllToAll, Routing
from ep.recorder import Recorder
from moe_kernels import TokenBatch

LAYERS, ROUNDS = 10_000, 9


def microseconds(lane: AllToAll) -> float:
    x_TD = torch.zeros(8, 64)
    routing = Routing(torch.zeros(8, 2, dtype=torch.int64), torch.ones(8, 2))
    began = time.perf_counter()
    for _ in range(LAYERS):
        arrived = lane.dispatch(x_TD, routing).wait()
        assert isinstance(arrived.batch, TokenBatch)
        lane.combine(arrived.batch.x_TD, arrived.ticket, x_TD).wait()
    return (time.perf_counter() - began) / LAYERS * 1e6


def main() -> None:
    torch.set_num_threads(1)
    lane = LocalAllToAll(1)
    plain, with_records = [], []
    with torch.inference_mode():
        for _ in range(ROUNDS):
            plain.append(microseconds(lane))
            with_records.append(microseconds(recorded([lane], Recorder(6 * LAYERS), layer=0)[0]))
    row = {"plain_us": statistics.median(plain), "recorded_us": statistics.median(with_records)}
    row["extra_us"] = row["recorded_us"] - row["plain_us"]
    print(json.dumps({name: round(value, 2) for name, value in row.items()}))


if __name__ == "__main__":
    main()
