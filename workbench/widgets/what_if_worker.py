"""A process that replays for the what-if widget, so that the notebook's own stays at hand.

Started afresh (spawn), it imports no torch. It is sent positions and sends back what it finds,
piece by piece; a newer request, or `cancel`, stops the running one between two rounds of its
search. What is wrong comes back in words. What it does not do: touch a widget.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from workbench.errors import WorkbenchError
from workbench.replay.answers import Answers
from workbench.search.recording import read_recording
from workbench.widgets.what_if_answers import exact, recording_basis
from workbench.widgets.what_if_position import Kept, Position, kept_recordings

QUIET_S = 0.3  # a request younger than that may be superseded while the hand still moves
JOIN_S = 5.0
NICENESS = 10
TAKEN = "Another what-if widget has the replay process now; move a control here to take it back."


class Request(NamedTuple):
    """What is wanted of a position, in this order: it replayed, its basis, others replayed."""

    number: int
    position: Position
    wants_basis: bool
    others: tuple[Position, ...] = ()


class Reply(NamedTuple):
    """One piece of an answer. kind: exact | basis | other | error | done; content: what it is.

    An error's content is a sentence.
    """

    number: int
    kind: str
    content: Any = None


class Superseded(Exception):
    """A newer request is there; nobody wants this one's answer."""


class Worker:
    """The process, as the notebook sees it: ask, cancel, close. hear: called with every reply.

    It is called in a thread of its own. The process starts with the first request, and again when
    it was lost. One runs at a time: the next worker to ask ends that of the one before.
    """

    _running: ClassVar[Worker | None] = None

    def __init__(self, recordings: Sequence[str], hear: Callable[[Reply], None]) -> None:
        self._recordings, self._hear = tuple(recordings), hear
        self._context = multiprocessing.get_context("spawn")
        self._newest = self._context.Value("q", 0)
        self._process: Any = None
        self._connection: Connection | None = None

    @property
    def newest(self) -> int:
        """The number of the request whose replies are wanted."""
        return int(self._newest.value)

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.is_alive()

    def ask(
        self, position: Position, *, wants_basis: bool = False, others: Sequence[Position] = ()
    ) -> int:
        """Ask about a position, in place of whatever was asked before; answers its number."""
        connection = self._connection if self.is_alive else None
        number = self.cancel()
        request = Request(number, position, wants_basis, tuple(others))
        try:
            (connection or self._start()).send(request)
        except OSError:  # it was lost just now, and does not look it yet
            self._start().send(request)
        return number

    def cancel(self) -> int:
        """Nothing that was asked so far is wanted any more; answers the next request's number."""
        with self._newest.get_lock():
            self._newest.value += 1
            return int(self._newest.value)

    def close(self) -> None:
        """End the process; it is gone when this returns. Another request starts a new one."""
        self.cancel()
        if Worker._running is self:
            Worker._running = None
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(OSError):  # it may be gone already
                connection.send(None)
        process, self._process = self._process, None
        if process is not None:
            _end(process)

    def _give_way(self) -> None:
        """To another worker; whoever waits for this one's replies is told."""
        number = self.newest
        self.close()
        self._hear(Reply(number, "error", TAKEN))

    def _start(self) -> Connection:
        other = Worker._running
        if other is not None and other is not self:
            other._give_way()
        Worker._running = self
        ours, theirs = self._context.Pipe()
        given = (theirs, self._newest, self._recordings, os.getpid())
        self._process = self._context.Process(target=serve, args=given, daemon=True)
        self._process.start()
        theirs.close()
        self._connection = ours
        threading.Thread(target=self._listen, args=(ours,), daemon=True).start()
        return ours

    def _listen(self, connection: Connection) -> None:
        """Hand on replies until the process is gone; one that is lost unasked is an error."""
        while True:
            try:
                reply = connection.recv()
            except (EOFError, OSError):
                break
            self._hear(reply)
        if connection is self._connection:
            sentence = "The replay process ended unexpectedly; move a control to start it again."
            self._hear(Reply(self.newest, "error", sentence))


def _end(process: Any) -> None:
    """Wait for it, and use force where it does not come to an end by itself."""
    for force in (process.terminate, process.kill):
        process.join(JOIN_S)
        if process.is_alive():
            force()
    process.join(JOIN_S)


def serve(connection: Connection, newest: Any, recordings: Sequence[str], parent: int) -> None:
    """The process: answer requests until None comes, or whoever asks is gone.

    An interrupt is meant for the notebook's cell, which a terminal's Ctrl-C shares with it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(os, "nice"):
        os.nice(NICENESS)  # what is painted comes first where there are few cores
    desk = Desk(kept_recordings(recordings), newest)
    while True:
        try:
            request = _latest(connection)
            if request is None:
                return
            for reply in desk.replies(request):
                connection.send(reply)
        except (EOFError, OSError):
            return
        if os.getppid() != parent:
            return


def _latest(connection: Connection) -> Request | None:
    """The next request, or the newer one that follows it within QUIET_S."""
    request: Request | None = connection.recv()
    while request is not None and connection.poll(QUIET_S):
        request = connection.recv()
    return request


class Desk:
    """Answers requests; keeps the recordings it has read, with the hashes they remember."""

    def __init__(self, kept: Mapping[str, Kept], newest: Any) -> None:
        self._kept, self._newest = kept, newest
        self._answers: dict[Path, Answers] = {}

    def replies(self, request: Request) -> Iterator[Reply]:
        """Piece by piece; the last is `done`, or an error. Nothing more once superseded."""
        number = request.number

        def stop_if_superseded(_: Any = None) -> None:
            if self._newest.value != number:
                raise Superseded

        try:
            stop_if_superseded()
            kept = self._kept[request.position.recording]
            answers = self._read(kept)
            yield Reply(number, "exact", exact(kept, request.position, answers, stop_if_superseded))
            if request.wants_basis:
                basis = recording_basis(kept, request.position, answers, stop_if_superseded)
                yield Reply(number, "basis", (request.position, basis))
            for position in request.others:
                yield Reply(number, "other", exact(kept, position, answers, stop_if_superseded))
            yield Reply(number, "done")
        except Superseded:
            return
        except Exception as error:  # whatever it is, somebody waits for an answer
            yield Reply(number, "error", in_words(error))

    def _read(self, kept: Kept) -> Answers:
        if kept.path not in self._answers:
            self._answers[kept.path] = Answers(read_recording(kept.path))
        return self._answers[kept.path]


def in_words(error: Exception) -> str:
    """A named error's own sentence; of others the kind and the place too."""
    if isinstance(error, WorkbenchError):
        return str(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {Path(place.filename).name}:{place.lineno}: {error}"
