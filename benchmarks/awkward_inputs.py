# Copyright Contributors to the numpyro_sgmcmc project.
# SPDX-License-Identifier: Apache-2.0

"""
Inputs as new users type them: is the posterior right, and if not, does somebody say so?

    python benchmarks/awkward_inputs.py [--only WORD ...] [--processes 2] [--limit 60]

Each case runs in a process of its own, which is ended at the limit. Draws are compared with an
independent answer, exact where there is one and else of NUTS on all rows. What is said is read
once, by a person: `awkward/readings.py` has what was thought of it.
"""

import argparse
from collections import Counter
import os
from pathlib import Path

# most of the time would go into compiling the same programs
CACHE = Path(__file__).parent.parent / ".jax_cache"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

from awkward import arrays, handlers, programs, runs, shapes, supports  # noqa: E402, F401
from awkward.cases import CASES, RUNNERS  # noqa: E402
from awkward.readings import reading_of  # noqa: E402
from verdicts import each_in_a_process, verdict_of  # noqa: E402


def outcome_of(case):
    return verdict_of(lambda: case.function(RUNNERS[case.kernel]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--only", nargs="*", default=[], help="words in the names of cases")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of a processor")
    parser.add_argument("--width", type=int, default=10_000, help="of messages")
    options = parser.parse_args()
    cases = [c for c in CASES if not options.only or any(w in c.name for w in options.only)]
    cases.sort(key=lambda case: case.kernel == "tuned")
    counts = Counter()
    print(
        "| case | verdict | seconds | reading | what was said |\n| --- | --- | ---: | --- | --- |"
    )
    for case, (verdict, said), seconds in each_in_a_process(
        outcome_of, cases, options.processes, options.limit
    ):
        verdict, reading = reading_of(case.name, verdict, said)
        counts[verdict] += 1
        said = " ".join(said.split()).replace("|", "\\|")[: options.width]
        print(f"| {case.name} | {verdict} | {seconds:.0f} | {reading} | {said} |", flush=True)
    total = ", ".join(f"{verdict} {count}" for verdict, count in sorted(counts.items()))
    print(f"\n{len(cases)} cases: {total}.")


if __name__ == "__main__":
    main()
