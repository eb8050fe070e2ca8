"""The command line: help that loads nothing heavy, errors in one clean block, stored runs."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

from tests.experiments.fakes import store_fake
from workbench.bench.record import Row
from workbench.cli import main, tools
from workbench.cli.options import key_values
from workbench.errors import ConfigError
from workbench.experiments.runs import FAILED
from workbench.experiments.settings import (
    RunSpec,
    sweep_config,
)

ROOT = Path(__file__).parents[2]
CONFIG = sweep_config("quick", num_problems=3)
VERBS = ("figures", "run", "sweep", "bench", "calibrate", "record", "train-tiny", "doctor")
EVERY_HELP = [[], ["runs"], *([name] for name in VERBS)]
EVERY_HELP += [["runs", name] for name in ("list", "show", "compare", "export", "import")]


def fresh(code):
    """Standard output of a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def stored(tmp_path):
    return [store_fake(tmp_path, RunSpec(CONFIG, share, 0)) for share in (0.3, 0.5)]


@pytest.mark.parametrize("command", EVERY_HELP, ids=" ".join)
def test_every_help_is_there_and_explains_each_option(command, capsys):
    assert main([*command, "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"Usage: {' '.join(['workbench', *command])} [OPTIONS]")
    assert "..." not in text.partition("Commands:")[2], "each summary fits a line of 80 columns"
    options = text.partition("Options:")[2].partition("Commands:")[0]
    for option in re.split(r"\n  (?=-)", options)[1:]:
        assert re.search(r"(  |\n +)\S", option), f"{option} is not explained"


def test_help_and_the_list_of_runs_load_no_torch(tmp_path):
    heavy = "{'torch', 'transformers', 'numba', 'plotly'} & set(sys.modules)"
    arguments = ["runs", "list", "--runs", str(tmp_path)]
    code = f"import sys; from workbench.cli import main; main({arguments!r}); print({heavy})"
    assert fresh(code).splitlines()[-1] == "set()"
    helped = "from workbench.cli import main; main(['sweep', '--help'])"
    heavy = "{'torch', 'pandas', 'numpy', 'rich'} & set(sys.modules)"
    assert fresh(f"import sys; {helped}; print({heavy})").splitlines()[-1] == "set()"


def test_bad_input_is_one_block_on_standard_error_and_status_2(capsys):
    assert main(["sweep", "--set", "tempature=1", "--dry-run"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "Did you mean 'temperature'" in shown.err
    assert "Traceback" not in shown.err
    with pytest.raises(ConfigError):
        main(["sweep", "--set", "tempature=1", "--debug"])


def test_a_dry_run_lists_runs_shares_and_minutes(tmp_path, capsys):
    options = ["--profile", "quick", "--shares", "0.02,0.3", "--runs", str(tmp_path)]
    assert main(["sweep", "--dry-run", *options]) == 0
    shown = capsys.readouterr().out
    assert "split-0.300-seed0" in shown
    assert "lacks" in shown
    assert "1 of 2 runs to do" in shown
    assert "is feasible in 64.0 MiB" in shown
    assert not any(tmp_path.iterdir())


def test_settings_come_from_profile_file_options_and_set_in_that_order(tmp_path, capsys):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"shares": [0.1, 0.2], "num_problems": 5, "n": 8}))
    options = ["--config", str(file), "--shares", "0.4", "--set", "seeds=[7]"]
    assert main(["sweep", "--dry-run", "--runs", str(tmp_path), *options]) == 0
    assert "split-0.400-seed7" in capsys.readouterr().out
    file.write_text("[1, 2")
    assert main(["sweep", "--dry-run", "--config", str(file)]) == 2
    assert "mine.json" in capsys.readouterr().err


def test_values_read_as_what_they_are():
    given = ["a=8", "b=0.3", "c=true", "d=none", "e=[1, 2]", "f=tiny", "g=a=b"]
    expected = {"a": 8, "b": 0.3, "c": True, "d": None, "e": [1, 2], "f": "tiny", "g": "a=b"}
    assert key_values(given, "-p") == expected
    with pytest.raises(ConfigError, match="is not NAME=VALUE"):
        key_values(["n"], "-p")


def test_runs_are_listed_shown_and_compared(tmp_path, stored, capsys):
    where = ["--runs", str(tmp_path)]
    assert main(["runs", "list", "--runs", str(tmp_path / "none")]) == 0
    assert "workbench sweep" in capsys.readouterr().out
    assert main(["runs", "list", *where]) == 0
    listed = capsys.readouterr().out
    assert all(folder.name in listed for folder in stored)
    assert main(["runs", "show", stored[0].name[-12:], *where]) == 0
    assert "machine_cpu" in capsys.readouterr().out
    assert main(["runs", "compare", "split-0.300", "split-0.500", *where]) == 0
    shown = capsys.readouterr().out
    assert "llm_share" in shown
    assert "tokens_per_s" in shown
    assert "tokens and scores: identical" in shown
    assert main(["runs", "show", "split-0.3000", *where]) == 2
    assert "Did you mean" in capsys.readouterr().err
    assert main(["runs", "show", "split", *where]) == 2
    assert "2 runs begin so" in capsys.readouterr().err


def test_runs_travel_by_export_and_import(tmp_path, stored, capsys):
    archive = str(tmp_path / "runs.tar.gz")
    assert main(["runs", "export", archive, "--runs", str(tmp_path)]) == 0
    there = ["--runs", str(tmp_path / "there")]
    assert main(["runs", "import", archive, *there]) == 0
    assert "2 runs stored, 0 were there already" in capsys.readouterr().out
    assert main(["runs", "import", archive, *there]) == 0
    assert "0 runs stored, 2 were there already" in capsys.readouterr().out
    assert main(["runs", "import", str(tmp_path / "none.zip"), *there]) == 2


def test_a_bench_prints_its_rows_and_writes_its_record(tmp_path, monkeypatch, capsys):
    class Fake:
        MODE = {"batch_invariant": True}

        @staticmethod
        def run(model="tiny-solver", profile="default", seed=0):
            yield Row("decode_b1", 12.5, "tokens/s", peer="transformers", peer_value=5.0, ratio=2.5)
            yield Row("gain", 0.2, "fraction", spread=(0.1, 0.3))

    monkeypatch.setattr(tools, "import_module", lambda name: Fake)
    file = tmp_path / "engine.json"
    assert main(["bench", "engine", "--json", str(file), "--profile", "quick"]) == 0
    shown = capsys.readouterr().out
    assert "2.50x transformers" in shown
    assert "[0.1, 0.3]" in shown
    record = json.loads(file.read_text())
    mode = {"profile": "quick", "model": "tiny-solver", "seed": 0, "batch_invariant": True}
    assert record["mode"] == mode | {"complete": True}
    assert [row["name"] for row in record["rows"]] == ["decode_b1", "gain"]
    assert main(["bench", "engine", "--llm", "x"]) == 2
    assert "takes no --llm" in capsys.readouterr().err


def test_a_bench_of_which_a_row_failed_says_so_and_exits_with_1(monkeypatch, capsys):
    """A share that cannot be is a finding; a search that died is none."""
    nothing = float("nan")
    rows = [Row("static_0.08@0.5W", nothing, "infeasible: llm_share 0.138 is infeasible")]
    fake = SimpleNamespace(run=lambda profile="default": iter(rows))
    monkeypatch.setattr(tools, "import_module", lambda name: fake)
    assert main(["bench", "memory"]) == 0
    rows.append(Row("elastic@0.5W", nothing, f"{FAILED}: a process was lost"))
    capsys.readouterr()
    assert main(["bench", "memory"]) == 1
    assert "Failed: elastic@0.5W." in capsys.readouterr().out


def test_a_bench_that_is_broken_off_writes_what_it_measured(tmp_path, monkeypatch, capsys):
    class Broken:
        @staticmethod
        def run(profile="default"):
            yield Row("decode_b1", 12.5, "tokens/s")
            os.kill(os.getpid(), signal.SIGTERM)  # as `timeout` does
            yield Row("never", 0.0, "s")

    monkeypatch.setattr(tools, "import_module", lambda name: Broken)
    file = tmp_path / "engine.json"
    assert main(["bench", "engine", "--json", str(file)]) == 130
    assert capsys.readouterr().err.strip() == "Interrupted."
    record = json.loads(file.read_text())
    assert record["mode"]["complete"] is False
    assert [row["name"] for row in record["rows"]] == ["decode_b1"]


def test_a_study_that_is_broken_off_says_that_it_resumes(monkeypatch, capsys):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("workbench.experiments.study.run_sweep", stopped)
    assert main(["sweep", "--profile", "quick"]) == 130
    assert "the same command resumes" in capsys.readouterr().err


@pytest.fixture
def no_notebooks(monkeypatch, tmp_path):
    """`workbench figures` with everything slow replaced; answers what was called."""
    calls = []

    def remember(place, answer):
        name = place.rpartition(".")[2]

        def call(*given, **named):
            calls.append((name, given, named))
            return answer

        monkeypatch.setattr(f"workbench.{place}", call)

    class Swept:
        runs = pd.DataFrame({"run_id": ["r"]})
        all_runs = pd.DataFrame()

    remember("experiments.study.run_sweep", Swept())
    remember("experiments.notebooks.run_notebooks", [tmp_path / "02.ipynb"])
    remember("experiments.study.provenance_of", "measured")
    for place in ("experiments.claims.claims_of", "cli.study.stored_ablation_claims"):
        remember(place, [])
    remember("experiments.study.figures_home", tmp_path / "figures")
    remember("experiments.notebooks.write_report", tmp_path / "index.html")
    remember("experiments.export.replot", [])
    monkeypatch.chdir(ROOT)
    return calls


def test_figures_sweeps_executes_and_reports(no_notebooks, tmp_path, capsys):
    options = ["--profile", "quick", "-p", "num_problems=2", "--runs", str(tmp_path)]
    assert main(["figures", *options]) == 0
    called = [name for name, _, _ in no_notebooks if name[:4] in ("run_", "writ")]
    assert called == ["run_sweep", "run_notebooks", "write_report"]
    swept, executed = no_notebooks[0][1], no_notebooks[1][1]
    assert (swept[0].profile, swept[0].num_problems, swept[1]) == ("quick", 2, str(tmp_path))
    assert executed[:3] == (None, "quick", {"num_problems": 2, "runs_dir": str(tmp_path)})
    assert "4 of 4 runs to do, about" in capsys.readouterr().out


def test_a_sweep_that_cannot_fit_is_said_before_any_notebook_runs(tmp_path, capsys):
    options = ["-p", "shares=[0.01, 0.02]", "--profile", "quick", "--runs", str(tmp_path)]
    assert main(["figures", *options]) == 2
    assert "llm_share 0.01 is infeasible: the LLM (tiny-solver) lacks" in capsys.readouterr().err
    assert main(["sweep", "--shares", "0.01", "--profile", "quick", "--runs", str(tmp_path)]) == 0
    assert "infeasible: split-0.010-seed0" in capsys.readouterr().out


@pytest.mark.parametrize("names", [["00"], ["01"], ["07"], ["01", "07"]])
def test_figures_of_notebooks_that_read_no_sweep_need_none(no_notebooks, names):
    """The tour, memory and the ablation build or run what they draw themselves."""
    assert main(["figures", *names]) == 0
    assert [name for name, _, _ in no_notebooks] == ["run_notebooks"]


def test_a_dry_run_says_what_the_ablation_would_take(tmp_path, capsys):
    """A notebook with runs beside the sweep's is announced with them."""
    assert main(["figures", "07", "--dry-run", "--runs", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "07_modifications: 13 of 13 runs to do, about" in said
    assert "feasible" not in said


def test_a_parameter_no_notebook_has_is_refused_before_anything_runs(no_notebooks, capsys):
    assert main(["figures", "-p", "num_problem=2"]) == 2
    assert "Did you mean 'num_problems'" in capsys.readouterr().err
    assert main(["figures", "77"]) == 2
    assert no_notebooks == []


def test_replot_and_dry_run_run_nothing(no_notebooks, tmp_path, capsys):
    assert main(["figures", "--replot", "memory_split"]) == 0
    assert [name for name, _, _ in no_notebooks] == ["replot"]
    assert main(["figures", "--dry-run", "--profile", "full", "--runs", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "55 of 55 runs to do" in shown
    assert "04_batching: " in shown
    assert main(["figures", "03", "--dry-run", "--runs", str(tmp_path)]) == 0
    assert "batching" not in capsys.readouterr().out
    assert [name for name, _, _ in no_notebooks] == ["replot"]


def test_one_search_prints_problem_tree_answer_and_speed(capsys):
    options = ["--n", "4", "--beam-width", "2", "--max-depth", "3", "--tree-depth", "2"]
    options += ["--set", "max_num_seqs=8", "--set", "max_num_batched_tokens=256"]
    assert main(["run", "Compute 3+4-2.", *options]) == 0
    shown = capsys.readouterr().out
    assert "Compute 3+4-2." in shown
    assert "tokens/s" in shown
    assert shown.count("├──") + shown.count("└──") >= 4


def test_a_format_that_no_name_tells_is_taken_from_the_option(capsys):
    """As the error that asks for it says."""
    options = ["--prm", "tiny-solver", "--n", "2", "--beam-width", "1", "--max-depth", "1"]
    assert main(["run", "Compute 3+4-2.", *options]) == 2
    assert "--prm-format" in capsys.readouterr().err
    assert main(["run", "Compute 3+4-2.", *options, "--prm-format", "rlhflow"]) == 0
