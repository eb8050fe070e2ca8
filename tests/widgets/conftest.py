"""Where a widget is shown, and where none is."""

import pytest

from workbench.widgets.parts import LIVE


@pytest.fixture
def is_shown(monkeypatch):
    """Says whether a front end holds this kernel; none does at first."""

    def say(shown):
        for name in LIVE:
            monkeypatch.delenv(name, raising=False)
        if shown:
            monkeypatch.setenv(LIVE[0], "a.ipynb")

    say(False)
    return say
