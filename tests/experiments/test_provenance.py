"""Which code a run is of: what counts as its code, and what does not."""

import shutil

import pytest

from workbench.experiments.provenance import PACKAGE, REPLAY_SOURCES, SOURCES, code_digest

SOURCE = '''"""A module."""

# a reason
def twice(x):
    """Two of them.

    x: a number.
    """
    return 2 * x  # the number

TEXT = """
# no comment

"""
'''


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        ("2 * x", "3 * x", False),
        ("# no comment", "# a comment", False),
        ("comment\n\n", "comment\n", False),
        ("Two of them", "Twice", True),
        ("\n    x: a number.", "", True),
        ("# a reason\n", "\n\n", True),
        ("  # the number", "", True),
    ],
)
def test_code_and_texts_count_prose_does_not(tmp_path, old, new, same):
    """Comments, docstrings and blank lines are prose; within a text they are the text."""
    file = tmp_path / "module.py"
    file.write_text(SOURCE)
    before = code_digest(file)
    assert before == code_digest(file)
    file.write_text(SOURCE.replace(old, new))
    assert (code_digest(file) == before) == same


def test_what_makes_a_run_is_in_its_code_and_what_draws_or_plans_it_is_not(tmp_path):
    copy = tmp_path / "workbench"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "*.parquet"))
    both = SOURCES, REPLAY_SOURCES
    sources = [[copy / each.relative_to(PACKAGE) for each in of] for of in both]

    def digests():
        return [code_digest(*each) for each in sources]

    now = digests()
    for module in ("plots/theme", "widgets/live", "cli/study", "bench/record", "experiments/study"):
        (copy / f"{module}.py").write_text("CHANGED = 1")
    assert digests() == now
    for module in ("core", "config", "tokenizer", "kernels/cpu/rows", "kvcache/pool",
                   "engine/engine", "models/llama", "search/rounds",
                   "experiments/execute", "experiments/batching"):  # fmt: skip
        (copy / f"{module}.py").write_text("CHANGED = 1")
        now, last = digests(), now
        assert all(a != b for a, b in zip(now, last)), module
    (copy / "replay" / "cost.py").write_text("CHANGED = 1")
    assert [a == b for a, b in zip(digests(), now)] == [True, False]
