"""The what-if widget: controls, figures, an estimate while a hand moves, the exact replay after.

    what_if()                                  in a notebook that can show widgets
    what_if(["mine.parquet"], device="a100-40", total_memory="40GiB")

Every number has a plain function behind it (what_if_answers.py), every text too (what_if_words.py).
What it does not do: compute in the notebook's own process what takes longer than a blink.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from workbench.errors import ConfigError
from workbench.replay.basis import Basis
from workbench.widgets.commands import papermill_command
from workbench.widgets.plot import PlotWidget
from workbench.widgets.split import is_live
from workbench.widgets.what_if_blocks import (
    block_rows,
    blocks_figure,
    fill_bars,
    frame_blocks,
    move_blocks,
    reframe_blocks,
)
from workbench.widgets.what_if_desk import Desk
from workbench.widgets.what_if_position import (
    DEFAULT_RECORDING,
    Kept,
    Position,
    kept_recordings,
    position_on,
)
from workbench.widgets.what_if_share import (
    fill,
    fill_ghosts,
    move_rings,
    reframe,
    share_figure,
)
from workbench.widgets.what_if_view import View
from workbench.widgets.what_if_words import cost_in_words, in_words, mark_in_html
from workbench.widgets.what_if_worker import Reply, Worker

NOTEBOOK = "what_if"
FIGURES_FOLDER = "build/figures/what_if"
NOT_LIVE = (
    "The controls are shown in a live notebook (Jupyter, VS Code); the figures above are where "
    "they would start."
)


def what_if(
    recordings: Sequence[str | os.PathLike[str]] | None = None,
    position: Position | None = None,
    bases: Sequence[tuple[Position, Basis]] = (),
    *,
    price_per_hour: float | None = None,
    folder: str = FIGURES_FOLDER,
) -> Any:
    """The widget where one can be shown, else a sentence.

    recordings: names or files, all of the package's by default; the position's is added where it is
    none of them. position: where it starts. bases:
    what is known already, so that the first estimate waits for nobody. price_per_hour: of the
    device, in any currency; none is assumed. folder: where figures are saved unless told otherwise.
    """
    if not is_live():
        return NOT_LIVE
    kept = kept_recordings(recordings)
    start = first_position(kept) if position is None else position
    if start.recording not in kept:
        kept |= kept_recordings([start.recording])
    return WhatIfWidget(kept, start, bases, price_per_hour, folder).box


def first_position(kept: Mapping[str, Kept]) -> Position:
    """As recorded: the default recording where it is there, else the first."""
    if not kept:
        raise ConfigError("There is no recording; make one with `workbench record` and name it.")
    return position_on(kept.get(DEFAULT_RECORDING) or next(iter(kept.values())))


class WhatIfWidget:
    """Controls and figures over a Desk. `box` is shown; `worker` replays; close() ends it."""

    def __init__(
        self,
        kept: Mapping[str, Kept],
        start: Position,
        bases: Sequence[tuple[Position, Basis]] = (),
        price_per_hour: float | None = None,
        folder: str = FIGURES_FOLDER,
        worker: Any = None,
    ) -> None:
        from workbench.widgets import parts  # noqa: PLC0415  an optional extra
        from workbench.widgets.what_if_controls import Controls  # noqa: PLC0415

        self._price = price_per_hour
        self.worker = worker or Worker([str(name) for name in kept], _to_main_thread(self.hear))
        self.desk = Desk(kept, self.worker, start)
        for position, basis in bases:
            self.desk.know(position, basis)
        self.controls = Controls(kept, start)
        self.share: Any = None
        self.blocks: Any = None
        self._shown: View | None = None
        self.words, self.cost = parts.sentence(), parts.sentence()
        self.status = parts.sentence()
        self.command = parts.CopyText(text=papermill_command(NOTEBOOK, parameters_of(start)))
        self._figures = parts.column([])
        pinning = (
            parts.button("pin for comparison", lambda: self._repinned(self.desk.pin)),
            parts.button("clear pins", lambda: self._repinned(self.desk.unpin)),
        )
        saving = parts.save_box(self.drawings, folder)
        self.box = parts.column(
            [self.controls.box, self.status, self._figures, *pinning, saving, self.command]
        )
        self.controls.observe(self.move)
        self.move(start)

    def move(self, position: Position | None = None) -> None:
        """The controls stand somewhere else (None: at what cannot be, and they say so)."""
        if position is None:
            self.desk.rest(self.controls.problem)
            self._draw(None)
            return
        view = self.desk.move(position)
        self.command.text = papermill_command(NOTEBOOK, parameters_of(position))
        self._draw(view)

    def hear(self, reply: Reply) -> None:
        """The worker found something."""
        view = self.desk.hear(reply)
        if view is None:
            self._say(self.desk.status)
        else:
            self._draw(view)

    def drawings(self) -> dict[str, Any]:
        """Both figures as they stand, with rows and parameters, to be saved."""
        view = self.desk.view
        if view is None:
            raise ConfigError("There is nothing to save yet; wait for the first replay.")
        parameters = parameters_of(view.answer.position)
        return {
            "what_if_share": (share_figure(view), view.rows, parameters),
            "what_if_blocks": (blocks_figure(view), block_rows(view), parameters),
        }

    def close(self) -> None:
        """End the worker's process."""
        self.worker.close()

    def _repinned(self, action: Callable[[], str]) -> str:
        """Pin or unpin; ghosts alone are drawn again, so marks and words stay what they were."""
        said = action()
        view, before = self.desk.view, self._shown
        if view is not None and before is not None and view.ghosts is not before.ghosts:
            self._shown = replace(before, ghosts=view.ghosts)
            with self.share.batch_update():
                fill_ghosts(self.share, self._shown)
            with self.blocks.batch_update():
                fill_bars(self.blocks, self._shown)
        return said

    def _say(self, sentence: str) -> None:
        self.status.value = sentence

    def _draw(self, view: View | None) -> None:
        """Put a view on the screen, and only what differs from the one before."""
        self._say(self.desk.status)
        if view is None:
            self._mark_unknown()
            return
        before, self._shown = self._shown, view
        if before is view:
            return
        if before is None:
            self.share = PlotWidget(share_figure(view, marked=False))
            self.blocks = PlotWidget(blocks_figure(view, marked=False))
            self._figures.children = [self.words, self.share, self.cost, self.blocks]
        else:
            _refill_share(self.share, view, before)
            _refill_blocks(self.blocks, view, before)
        kind = mark_in_html(view.answer)
        self.words.value = in_words(view.answer, kind)
        self.cost.value = cost_in_words(view.answer, self._price, kind)

    def _mark_unknown(self) -> None:
        """What is drawn is said to be of another place; sentences about it go."""
        if self._shown is not None:
            self.words.value = self.cost.value = mark_in_html(None)


def _refill_share(fig: PlotWidget, view: View, before: View) -> None:
    with fig.batch_move():
        move_rings(fig, view)
    with fig.batch_update():
        if view.face == before.face:
            fill(fig, view, before)
        else:
            reframe(fig, view)


def _refill_blocks(fig: PlotWidget, view: View, before: View) -> None:
    with fig.batch_move():
        move_blocks(fig, view)
    with fig.batch_update():
        if view.face == before.face:
            frame_blocks(fig, view)
        else:
            reframe_blocks(fig, view)


def parameters_of(position: Position) -> dict[str, Any]:
    """A position as the notebook's parameters; a file's name is absolute, it has no other."""
    given = position.to_dict()
    if Path(given["recording"]).suffix == ".parquet":
        given["recording"] = str(Path(given["recording"]).resolve())
    return given


def _to_main_thread(hear: Callable[[Reply], None]) -> Callable[[Reply], None]:
    """Call `hear` where widgets live: in the kernel's event loop, if there is one."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return hear
    return lambda reply: _unless_closed(loop, hear, reply)


def _unless_closed(
    loop: asyncio.AbstractEventLoop, hear: Callable[[Reply], None], reply: Reply
) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(hear, reply)
