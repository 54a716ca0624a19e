"""Records what has changed: ``python -m tests.accelerators.facts``, which is ``make facts``.

It can be interrupted, and then goes on where it was. With other versions of the compilers than the
record's it shows the differences and records nothing; ``--all`` without ``--only`` then records all
cases anew. Cases that exist no more are removed.
"""

import argparse
import concurrent.futures
import multiprocessing
import re
import time
from typing import Any

from . import cases, record


def main() -> None:
    """Compiles in several processes, and writes after each program."""
    parser = argparse.ArgumentParser(prog=record.COMMAND, description=__doc__)
    parser.add_argument("--only", default="", help="a pattern of cases: 'rows/.*/64/v5e'")
    parser.add_argument("--all", action="store_true", help="also those that have not changed")
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    record_anew(given.only, given.all, given.workers)


def record_anew(only: str, also_unchanged: bool, workers: int) -> None:
    """Records the cases that match a pattern."""
    facts, programs = record.read(record.FACTS), record.read(record.PROGRAMS)
    save = write
    if facts and facts["versions"] != record.versions():
        if also_unchanged and not only:
            facts = {}
        else:
            print(
                f"The record is of {_listed(facts['versions'])}; here are "
                f"{_listed(record.versions())}. So nothing is recorded. "
                "To record all cases with these versions: --all without --only.",
                flush=True,
            )
            save = lambda facts, programs: None
        programs = {}
    known = {} if also_unchanged else programs
    chosen = [key for key in cases.CASES if re.search(only, key)]
    begun = time.perf_counter()
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, spawn) as pool:
        pending = [pool.submit(record.anew, key, known.get(key)) for key in chosen]
        try:
            for done, future in enumerate(concurrent.futures.as_completed(pending), 1):
                key, program, now = future.result()
                if now is None:
                    continue
                seconds = time.perf_counter() - begun
                print(f"{done}/{len(chosen)} {key} ({seconds:.0f} s)", flush=True)
                for line in record.differences(facts[key], now) if key in facts else ():
                    print(f"    {line}", flush=True)
                facts[key], programs[key] = now, program
                save(facts, programs)
        finally:
            pool.shutdown(cancel_futures=True)
    save(facts, programs)


def _listed(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def write(facts: dict[str, Any], programs: dict[str, str]) -> None:
    """Both files, in the order of the cases."""
    in_order = lambda entries: {key: entries[key] for key in cases.CASES if key in entries}
    record.write(record.FACTS, {"versions": record.versions(), **in_order(facts)})
    record.write(record.PROGRAMS, in_order(programs))


if __name__ == "__main__":
    main()
