"""One benchmark on a GPU and its record: `workbench bench` where typer and rich are missing.

Called by .ci/gpu: NAME FILE PROFILE [--model M] [--llm M] [--prm M] [--device D]
"""

import argparse
from functools import partial

from workbench.bench import measure


def main() -> None:
    """Print rows as they come; write the record also of a run that was broken off."""
    parser = argparse.ArgumentParser(description=__doc__)
    for option in ("name", "file", "profile", "--model", "--llm", "--prm", "--device"):
        parser.add_argument(option)
    given = {option: value for option, value in vars(parser.parse_args()).items() if value}
    name, file = given.pop("name"), given.pop("file")
    measure(name, given, file, partial(print, flush=True))


if __name__ == "__main__":
    main()
