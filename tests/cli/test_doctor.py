"""`workbench doctor` tells the truth: what is missing is named with its remedy."""

import io

import pytest
from rich.console import Console

from workbench.cli import doctor
from workbench.errors import ModelError


def test_reports_a_sound_machine() -> None:
    """Here, where the tests run, everything needed is present."""
    page = io.StringIO()
    assert doctor.run(Console(file=page, width=160)) == 0
    for topic in ("processor", "threads", "memory", "versions", "tiny-solver", "tiny-prm", "runs"):
        assert topic in page.getvalue()
    for name in ("Qwen2ForProcessRewardModel", "math-shepherd"):  # what is supported
        assert name in page.getvalue()


def test_a_missing_browser_is_a_remark(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Chromium figures are still made as HTML: the remedy is named, nothing fails."""
    monkeypatch.delenv("BROWSER_PATH", raising=False)
    monkeypatch.setenv("PATH", "")
    finding = doctor.browser()
    assert "chromium" in finding.remedy
    assert not finding.needed


def test_a_model_that_cannot_be_read_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """No run works without the embedded models: exit status 1 and the loader's own words."""

    def refuse(name: str) -> None:
        raise ModelError(f"{name} is truncated.")

    monkeypatch.setattr("workbench.models.loading.load_model", refuse)
    page = io.StringIO()
    assert doctor.run(Console(file=page, width=160)) == 1
    assert "tiny-solver is truncated." in page.getvalue()
