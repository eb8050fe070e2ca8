"""The command line: help that loads nothing heavy, stored runs, benchmarks, one search, doctor."""

import json
import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from tests.experiments.fakes import IDENTITY, store_fake
from workbench.bench.record import Row
from workbench.cli import main
from workbench.cli.options import key_values
from workbench.errors import ConfigError, ModelError
from workbench.experiments.plans import sweep_config
from workbench.experiments.provenance import this_code
from workbench.experiments.runs import FAILED
from workbench.experiments.settings import RunSpec
from workbench.kernels.isa import VARIABLE, environment, host_sets
from workbench.replay.devices import load_device

CONFIG = sweep_config("quick", num_problems=3)
VERBS = ("figures", "run", "sweep", "advise", "bench", "calibrate", "record", "train-tiny")
EVERY_HELP = [[], ["runs"], ["doctor"], *([name] for name in VERBS)]
EVERY_HELP += [["runs", name] for name in ("list", "show", "compare", "export", "import")]


@pytest.fixture
def stored(tmp_path):
    return [store_fake(tmp_path, RunSpec(CONFIG, share, 0)) for share in (0.3, 0.5)]


@pytest.mark.parametrize("command", EVERY_HELP, ids=" ".join)
def test_every_help_is_there_and_explains_each_option(command, says):
    text = says(*command, "--help")
    assert text.startswith(f"Usage: {' '.join(['workbench', *command])} [OPTIONS]")
    assert "..." not in text.partition("Commands:")[2], "each summary fits a line of 80 columns"
    options = text.partition("Options:")[2].partition("Commands:")[0]
    for option in re.split(r"\n  (?=-)", options)[1:]:
        assert re.search(r"(  |\n +)\S", option), f"{option} is not explained"


def test_a_dry_run_takes_profile_file_options_and_set_in_that_order(tmp_path, says):
    """It lists runs, shares and minutes, and runs nothing."""
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"shares": [0.1, 0.2], "num_problems": 5, "n": 8}))
    options = ["--config", str(file), "--shares", "0.02,0.4", "--set", "seeds=[7]"]
    shown = says("sweep", "--dry-run", "--runs", str(tmp_path / "runs"), *options)
    for text in ("split-0.400-seed7", "lacks", "1 of 2 runs to do", "is feasible in 64.0 MiB"):
        assert text in shown
    assert [path.name for path in tmp_path.iterdir()] == ["mine.json"]
    file.write_text('{"profile": "full"}')
    words = ["sweep", "--dry-run", "--profile", "quick", "--config", str(file)]
    assert "--profile is quick, " in says(*words, status=2)


def test_none_takes_a_profile_s_value_away(tmp_path, monkeypatch, says):
    """Also in a file; where a setting must have a value it is refused by name."""
    seen, place = [], "workbench.cli.study._print_preview"
    monkeypatch.setattr(place, lambda config, *_: seen.append(config))
    call = ["sweep", "--profile", "thesis", "--dry-run"]
    assert sweep_config("thesis").max_model_len is not None
    file = tmp_path / "mine.json"
    file.write_text('{"max_model_len": null}')
    for given in (["--set", "max_model_len=none"], ["--config", str(file)]):
        assert main([*call, *given]) == 0
    assert [config.max_model_len for config in seen] == [None, None]
    assert seen[0].prm_format == sweep_config("thesis").prm_format
    assert "n is None" in says(*call, "--set", "n=none", status=2)


def test_values_read_as_what_they_are():
    given = ["a=8", "b=0.3", "c=true", "d=none", "e=[1, 2]", "f=tiny", "g=a=b"]
    expected = {"a": 8, "b": 0.3, "c": True, "d": None, "e": [1, 2], "f": "tiny", "g": "a=b"}
    assert key_values(given, "-p") == expected
    with pytest.raises(ConfigError, match="is not NAME=VALUE"):
        key_values(["n"], "-p")


def test_runs_are_listed_shown_and_compared(tmp_path, stored, says):
    where = ["--runs", str(tmp_path)]
    assert "workbench sweep" in says("runs", "list", "--runs", str(tmp_path / "none"))
    none = says("runs", "list", *where, "--status", "infeasible")
    assert "No stored run is infeasible." in none
    listed = says("runs", "list", *where)
    assert all(folder.name in listed for folder in stored)
    assert listed.count("finished, other code") == 2
    own = replace(IDENTITY, code=this_code()["code"])
    store_fake(tmp_path / "own", RunSpec(CONFIG, 0.3, 0), own)
    assert "other code" not in says("runs", "list", "--runs", str(tmp_path / "own"))
    assert "machine_cpu" in says("runs", "show", stored[0].name[-12:], *where)
    shown = says("runs", "compare", "split-0.300", "split-0.500", *where)
    for text in ("llm_share", "tokens_per_s", "Tokens and scores: identical"):
        assert text in shown
    assert "Did you mean" in says("runs", "show", "split-0.3000", *where, status=2)
    assert "2 runs begin so" in says("runs", "show", "split", *where, status=2)


def test_what_looks_like_markup_is_printed_as_it_is(tmp_path, capsys):
    """A prompt with the tags of a chat template, which rich would take for its own."""
    prompts = ("[INST] a [/INST]", "[bold]b")
    specs = [RunSpec(replace(CONFIG, system_prompt=text), 0.3, 0) for text in prompts]
    folders = [str(store_fake(tmp_path, spec)) for spec in specs]
    assert main(["runs", "show", folders[0]]) == main(["runs", "compare", *folders]) == 0
    shown = capsys.readouterr().out
    assert shown.count(prompts[0]) == 2 and prompts[1] in shown


def test_runs_travel_by_export_and_import(tmp_path, stored, says):
    archive, again = str(tmp_path / "runs.tar.gz"), "0 runs stored, 2 were there already"
    there = ["--runs", str(tmp_path / "there")]
    says("runs", "export", archive, "--runs", str(tmp_path))
    assert "2 runs stored, 0 were there already" in says("runs", "import", archive, *there)
    assert again in says("runs", "import", archive, *there)
    says("runs", "import", str(tmp_path / "none.tar"), *there, status=2)
    light = tmp_path / "light.tar.gz"
    says("runs", "export", str(light), "--light", "--runs", str(tmp_path))
    assert light.stat().st_size < Path(archive).stat().st_size
    assert again in says("runs", "import", str(light), *there), "as far as it goes"


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """`bench engine` of a benchmark that measures these rows: its exit status and its record."""

    def run_bench(rows, *options):
        def run(model="tiny-solver", profile="default", seed=0):
            yield from rows

        module = SimpleNamespace(MODE={"batch_invariant": True}, run=run)
        monkeypatch.setattr("workbench.bench.import_module", lambda name: module)
        file = tmp_path / "engine.json"
        status = main(["bench", "engine", "--json", str(file), *options])
        return status, json.loads(file.read_text())

    return run_bench


DECODE = Row("decode_b1", 12.5, "tokens/s", peer="transformers", peer_value=5.0, ratio=2.5)


def test_a_bench_held_to_a_set_holds_its_peers_to_it(bench, monkeypatch):
    """Guards WORKBENCH_ISA set alone: torch and its libraries would keep the host's best set."""
    begun: list[dict[str, str]] = []
    monkeypatch.setattr("os.execve", lambda file, words, variables: begun.append(dict(variables)))
    name = host_sets()[-1]
    monkeypatch.setenv(VARIABLE, name)
    for variable in environment(name).keys() - {VARIABLE}:
        monkeypatch.delenv(variable, raising=False)
    bench([DECODE], "--isa", name)
    assert len(begun) == (name != "neon")  # whose peers know no such variable
    for variable, value in environment(name).items():
        assert all(variables[variable] == value for variables in begun)
        monkeypatch.setenv(variable, value)
    bench([DECODE], "--isa", name)
    assert len(begun) == (name != "neon"), "begun again although all is set"


def test_a_bench_prints_its_rows_and_writes_its_record(bench, capsys, says):
    rows = [DECODE, Row("gain", 0.2, "fraction", spread=(0.1, 0.3))]
    status, record = bench(rows, "--profile", "quick")
    assert status == 0
    shown = capsys.readouterr().out
    assert "2.50x transformers" in shown
    assert "[0.1, 0.3]" in shown
    mode = {"profile": "quick", "model": "tiny-solver", "seed": 0, "batch_invariant": True}
    assert record["mode"] == mode | {"complete": True}
    assert [row["name"] for row in record["rows"]] == ["decode_b1", "gain"]
    assert "takes no --llm" in says("bench", "engine", "--llm", "x", status=2)


def test_a_bench_of_which_a_row_failed_says_so_and_exits_with_1(bench, capsys):
    """A share that cannot be is a finding; a search that died is none."""
    nothing = float("nan")
    rows = [Row("static_0.08@0.5W", nothing, "infeasible: llm_share 0.138 is infeasible")]
    assert bench(rows)[0] == 0
    assert "Failed" not in capsys.readouterr().out
    assert bench([*rows, Row("elastic@0.5W", nothing, f"{FAILED}: a process was lost")])[0] == 1
    assert "Failed: elastic@0.5W." in capsys.readouterr().out


def test_a_bench_that_is_broken_off_writes_what_it_measured(bench, capsys):
    def rows():
        yield DECODE
        os.kill(os.getpid(), signal.SIGTERM)  # as `timeout` does
        yield Row("never", 0.0, "s")

    status, record = bench(rows())
    assert status == 130
    assert capsys.readouterr().err.strip() == "Interrupted."
    assert record["mode"]["complete"] is False
    assert [row["name"] for row in record["rows"]] == ["decode_b1"]


def test_a_whole_record_is_kept_where_the_next_run_fails(bench, capsys):
    """What the failed one measured lies beside it."""

    def rows():
        yield Row("decode_b1", 1.0, "tokens/s")
        raise ConfigError("no weights")

    bench([DECODE])
    status, record = bench(rows())
    assert status == 2 and record["mode"]["complete"] and record["rows"][0]["value"] == 12.5
    beside = Path(capsys.readouterr().out.split("written: ")[-1].strip())
    assert beside.name == "engine.partial.json"
    assert json.loads(beside.read_text())["rows"][0]["value"] == 1.0


def test_a_package_that_is_not_installed_is_named(monkeypatch, says):
    lacking = Mock(side_effect=ModuleNotFoundError("No module named 'plotly'", name="plotly"))
    monkeypatch.setattr("workbench.bench.import_module", lacking)
    assert "bench needs plotly: pip install -e '.[all]'." in says("bench", "memory", status=2)


def test_a_study_that_is_broken_off_says_that_it_resumes(monkeypatch, says):
    stopped = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("workbench.experiments.study.run_sweep", stopped)
    assert "the same command resumes" in says("sweep", "--profile", "quick", status=130)


def test_one_search_prints_problem_tree_answer_and_speed(says):
    options = ["--n", "4", "--beam-width", "2", "--max-depth", "3", "--tree-depth", "2"]
    options += ["--set", "max_num_seqs=8", "--set", "max_num_batched_tokens=256"]
    shown = says("run", "Compute 3+4-2.", *options)
    assert "Compute 3+4-2." in shown
    assert "tokens/s" in shown and re.search(r"^answer +\S", shown, re.MULTILINE)
    assert shown.count("├──") + shown.count("└──") >= 4


def test_one_search_by_another_engine_prints_the_same_tree(says):
    """`--engine transformers` in place of ours; the speed alone differs."""
    options, shown = ["--n", "4", "--beam-width", "2", "--max-depth", "3"], []
    for engine in ([], ["--engine", "transformers"]):
        lines = says("run", "Compute 3+4-2.", *options, *engine).splitlines()
        shown.append([line for line in lines if not line.startswith("speed")])
    assert shown[0] == shown[1] and any("└──" in line for line in shown[0])


def test_a_format_that_no_name_tells_is_taken_from_the_option(says):
    """As the error that asks for it says."""
    words = ["run", "Compute 3+4-2.", "--prm", "tiny-solver"]
    words += ["--n", "2", "--beam-width", "1", "--max-depth", "1"]
    assert "--prm-format" in says(*words, status=2)
    says(*words, "--prm-format", "rlhflow")


def test_reports_a_sound_machine(tmp_path, says, monkeypatch):
    """Here, where the tests run, everything needed is present."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))  # kernels count as compiled: models load
    page = says("doctor")
    topics = ("processor", "threads", "memory", "versions", "tiny-solver", "tiny-prm", "runs")
    for topic in (*topics, "Qwen2ForProcessRewardModel", "math-shepherd"):  # what is supported
        assert topic in page


def test_what_is_missing_is_named_with_its_remedy(tmp_path, monkeypatch, says):
    """No browser is a remark; without the embedded models no run works: exit status 1."""

    def refuse(name: str):
        raise ModelError(f"{name} is truncated.")

    monkeypatch.delenv("BROWSER_PATH", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("workbench.models.loading.load_model", refuse)
    page = says("doctor", status=1)
    assert "apt install chromium" in page and "tiny-solver is truncated." in page


def test_advice_is_a_page_of_100_columns_or_json(monkeypatch, says):
    """With the share, what to change, the replays and flags of both engines; options by name."""
    from workbench.replay import advise

    monkeypatch.setattr(advise, "MOST_ROUNDS", 4)
    real, advised = advise.advise, Mock()
    monkeypatch.setattr(advise, "advise", advised)
    given = {"device": "h100", "total": "28MiB", "n": 4, "in_flight": 4, "max_num_seqs": 64}
    given |= {"max_num_batched_tokens": 256, "max_model_len": 2048}
    advised.return_value = found = real("tiny-solver", "tiny-prm", **given)
    options = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    command = ["advise", "--llm", "tiny-solver", "--prm", "tiny-prm", *options]
    shown = says(*command)
    advised.assert_called_once_with("tiny-solver", "tiny-prm", **given)
    assert max(len(line) for line in shown.splitlines() if "embedded/" not in line) <= 100
    for text in (f"share {found.recommended:.3g}", "What to change first", "max_num_seqs 128",
                 "--gpu-memory-util", "--mem-fraction-st", found.notes[0][:20],
                 "at 0.5     does not fit", "--port 8001 --gpu", "--port 30001 --mem",
                 "more than the least that each starts with", "%) computed again: ",
                 "add --max-total-"):  # fmt: skip
        assert text in shown
    assert "may not start" not in shown
    told = json.loads(says(*command, "--json"))
    advised.return_value = found = replace(found, total=load_device("h100").memory_bytes)
    shown = says(*command)
    assert shown.index("The second may not start") < shown.index("--gpu-memory-util")
    assert told["recommended"] == found.recommended and len(told["replays"]) == len(found.replays)


def test_the_doctor_compiles_nothing(monkeypatch, tmp_path, says):
    """On a fresh clone that takes a minute, in which it was silent."""
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setattr("workbench.experiments.provenance.PACKAGE", tmp_path)
    monkeypatch.setattr("workbench.models.loading.load_model", lambda name: pytest.fail(name))
    assert "not compiled yet: the first run does it" in says("doctor")
