"""`workbench doctor` tells the truth: what is missing is named with its remedy."""

from workbench.cli import main
from workbench.errors import ModelError


def test_reports_a_sound_machine(capsys) -> None:
    """Here, where the tests run, everything needed is present."""
    assert main(["doctor"]) == 0
    page = capsys.readouterr().out
    for topic in ("processor", "threads", "memory", "versions", "tiny-solver", "tiny-prm", "runs"):
        assert topic in page
    for name in ("Qwen2ForProcessRewardModel", "math-shepherd"):  # what is supported
        assert name in page


def test_what_is_missing_is_named_with_its_remedy(monkeypatch, capsys) -> None:
    """No browser is a remark; without the embedded models no run works: exit status 1."""

    def refuse(name: str) -> None:
        raise ModelError(f"{name} is truncated.")

    monkeypatch.delenv("BROWSER_PATH", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("workbench.models.loading.load_model", refuse)
    assert main(["doctor"]) == 1
    page = capsys.readouterr().out
    assert "apt install chromium" in page
    assert "tiny-solver is truncated." in page
