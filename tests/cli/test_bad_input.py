"""Bad values on the command line: each one named error with what is allowed, status 2."""

import re
import shutil

import pytest
from safetensors.torch import load_file, save_file

from workbench.cli import main
from workbench.models.registry import find_model


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--problems", "tiny", "--index", "0", "--level", "9"], "level"),
        (["--llm", "tiny-solvr"], "Did you mean 'tiny-solver'"),
        (["--set", "n=abc"], "SweepConfig.n is 'abc'; allowed: a whole number."),
        (["--set", "temperature=x"], "temperature is 'x'; allowed: a number."),
        (["--llm-share", "1.5"], "--llm-share is 1.5; allowed: a share in (0, 1)."),
        ([""], "has the text ''"),
        (["Compute 1+1.", "--index", "0"], "the problem 'Compute 1+1.' and --index"),
        (["Compute 1+1.", "--problems", "tiny"], "and --problems"),
    ],
)
def test_a_search_that_cannot_be_says_why_in_one_block(options, said, capsys):
    """Whatever is wrong with `run`: one named error, status 2, never a traceback."""
    assert main(["run", *options]) == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert "Traceback" not in shown.err
    assert shown.out == ""


@pytest.mark.parametrize(
    ("options", "lacking"),
    [(["--llm-share", "0.01"], "tiny-solver"), (["--llm-share", "0.99"], "tiny-prm")],
)
def test_a_share_without_room_names_the_model_and_the_shares_that_fit(options, lacking, capsys):
    assert main(["run", "Compute 1+1.", *options]) == 2
    said = capsys.readouterr().err
    assert f"llm_share {options[1]} of 64.0 MiB is infeasible. {lacking}: " in said
    assert re.search(r"llm_share 0\.0\d+ to 0\.\d+ is feasible in 64\.0 MiB\.", said)


def test_a_reward_model_with_nan_in_its_weights_is_refused_by_tensor(tmp_path, capsys):
    """A damaged PRM would score every step alike; nothing is searched with it."""
    folder = shutil.copytree(find_model("tiny-prm"), tmp_path / "tiny-prm")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    assert main(["run", "Compute 1+1.", "--prm", str(folder)]) == 2
    said = capsys.readouterr().err
    assert "model.norm.weight holds numbers that are not finite" in said


@pytest.mark.parametrize("setting", ["seeds=0", "shares=0.3", "shares=[a]", "num_problems=many"])
def test_a_setting_of_another_type_is_refused_by_name(setting, capsys):
    assert main(["sweep", "--dry-run", "--set", setting]) == 2
    said = capsys.readouterr().err
    assert f"SweepConfig.{setting.split('=')[0]} is" in said
    assert "; allowed: a " in said


@pytest.mark.parametrize(
    "command",
    [
        ["run", "--index", "-1"],
        ["bench", "search", "--seeds", "0"],
        ["train-tiny", "--card", "--num-problems", "0"],
    ],
    ids=" ".join,
)
def test_a_number_that_is_too_small_is_refused_with_the_least_one(command, capsys):
    assert main(command) == 2
    said = capsys.readouterr().err
    assert re.search(rf"'{command[-2]}': Input should be greater than or equal to [01]", said)


def test_no_training_time_writes_no_weights(tmp_path, capsys):
    assert main(["train-tiny", "--minutes", "0", "--out", str(tmp_path / "out")]) == 2
    assert "minutes is 0.0; allowed: more than 0" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_unknown_model_is_refused_before_the_machine_is_measured(monkeypatch, capsys):
    from workbench.bench import ceilings

    monkeypatch.setattr(ceilings, "tile_shares", lambda: pytest.fail("it measured"))
    assert main(["bench", "engine", "--model", "nosuch"]) == 2
    assert "nosuch" in capsys.readouterr().err
