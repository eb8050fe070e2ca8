"""One benchmark on a GPU and its record: `workbench bench` without what a bare machine lacks.

Called by .ci/gpu: NAME FILE PROFILE [--model M] [--llm M] [--prm M]
"""

import argparse
import inspect
import signal
import sys
from importlib import import_module

from workbench.bench import code_of
from workbench.bench.record import record, write_record


def main() -> int:
    """Print rows as they come; write the record also of a run that was broken off."""
    given = arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    module = import_module(f"workbench.bench.{given.name}")
    named = {n: getattr(given, n) for n in ("model", "llm", "prm") if getattr(given, n)}
    takes = inspect.signature(module.run).parameters
    settings = {"profile": given.profile, **named} | (
        {"device": "cuda"} if "device" in takes else {}
    )
    code_of(given.name)  # as it is before it runs
    rows, complete = [], False
    try:
        for row in module.run(**settings):
            rows.append(row)
            ratio = "" if row.ratio is None else f"{row.ratio:.2f}x {row.peer}"
            share = "" if row.share_of_ceiling is None else f"{row.share_of_ceiling:.0%} of ceiling"
            line = f"{row.name:36} {row.value:12.4g} {row.unit:9} {ratio:18} {share}"
            print(line, flush=True)  # noqa: T201 - a command
        complete = True
    finally:
        own = module.mode_of(settings) if hasattr(module, "mode_of") else module.MODE
        write_record(record(given.name, rows, settings | own | {"complete": complete}), given.file)
    return 0


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("name", "file", "profile"):
        parser.add_argument(name)
    for name in ("--model", "--llm", "--prm"):
        parser.add_argument(name)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
