"""Where a widget is shown, and where none is; replays that several files look at."""

from functools import partial

import pytest

from workbench.widgets import what_if_replay
from workbench.widgets.parts import LIVE

SHARES = (0.2, 0.3, 0.4)
HOSTILE = "<img src=x onerror=alert(1)>"
SMALL, OTHER = "tiny-16-n4", "smollm2-n4"  # the shortest replays of the package's


@pytest.fixture(scope="session")
def infos():
    return what_if_replay.find_recordings([SMALL, OTHER])


@pytest.fixture(scope="session")
def position(infos):
    return infos[SMALL].position(total_memory="48MiB", llm_share=0.3)


@pytest.fixture(scope="session")
def replays(infos, position):
    return [what_if_replay.replay(infos[SMALL], position.at(share)) for share in SHARES]


@pytest.fixture
def open_front_end(monkeypatch):
    """No front end holds this kernel until this is called."""
    for name in LIVE:
        monkeypatch.delenv(name, raising=False)
    return partial(monkeypatch.setenv, LIVE[0], "a.ipynb")
