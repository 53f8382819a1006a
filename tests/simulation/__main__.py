"""`python -m tests.simulation --schedules 10000 --seed 0`: the control plane under seeded faults, in fake time."""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import logging
import sys
import time
import traceback
from collections import Counter

from tests.simulation.plants import PLANTS
from tests.simulation.schedules import draw
from tests.simulation.simulation import Simulation


def run_one(seed: int, verbose: bool = False) -> tuple[Counter[str], str]:
    """What happened, and what went wrong ("": nothing)."""
    schedule = draw(seed)
    out = sys.stdout
    if verbose:
        print(schedule.describe())
    simulation = Simulation(schedule, (lambda line: print(line, file=out)) if verbose else None)
    error = ""
    with contextlib.redirect_stderr(out if verbose else io.StringIO()):
        try:
            simulation.run()
        except Exception as raised:
            if verbose:
                traceback.print_exc(file=out)
            error = f"{type(raised).__name__}: {raised}"
    return simulation.counts, error


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--schedules", type=int, default=1000, help="how many, with seeds one after another")
    parser.add_argument("--seed", type=int, default=0, help="of the first one")
    parser.add_argument("--verbose", action="store_true", help="print each schedule and what happens in it")
    parser.add_argument("--plant", choices=sorted(PLANTS), help="plant this bug; it must be found")
    parser.add_argument("--keep-going", action="store_true", help="go on after a failure")
    options = parser.parse_args()
    logging.getLogger("moesaic").setLevel(logging.DEBUG if options.verbose else logging.CRITICAL)
    began = shown = time.monotonic()
    cpu = time.process_time()
    total: Counter[str] = Counter()
    failed: list[int] = []
    num_run = 0
    plant = PLANTS[options.plant] if options.plant else contextlib.nullcontext
    with plant():
        for seed in range(options.seed, options.seed + options.schedules):
            counts, error = run_one(seed, options.verbose)
            total += counts
            num_run += 1
            if error:
                failed.append(seed)
                planted = f" --plant {options.plant}" if options.plant else ""
                print(f"seed {seed}: {error}")
                print(f"  python -m tests.simulation --seed {seed} --schedules 1 --verbose{planted}", flush=True)
                if not options.keep_going:
                    break
            if time.monotonic() - shown > 2.0:
                shown = time.monotonic()
                rate = 60 * num_run / (shown - began)
                print(f"{num_run} of {options.schedules} schedules, {rate:.0f} per minute", file=sys.stderr, flush=True)
            if num_run % 500 == 0:
                gc.collect()
    seconds = time.monotonic() - began
    result = {
        "schedules": num_run,
        "failed": len(failed),
        "per_minute": round(60 * num_run / seconds),
        "per_cpu_minute": round(60 * num_run / (time.process_time() - cpu)),
        "kills": total["kill"] + total["crash"],
        "hangs": total["stop"] + total["hang"] + total["aloof"],
        "busy": total["busy"],
        "cuts": total["cut"],
        "pauses": total["pause"],
        "slow": total["slow"],
        "resizes": total["resize"],
        "all_lost": total["all"],
        "disk": total["away"] + total["changed"] + total["stall"],
        "stalls": total["front"] + total["supervisor"],
        "losses": total["losses"],
        "requests": total["requests"],
        "replayed": total["replayed"],
        "refused": total["refused"],
        "ended": total["ended"],
        "events": total["events"],
        "seeds": failed,
    }
    print(json.dumps(result))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
