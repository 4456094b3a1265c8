"""Long work in the background: one job after the other, each with its progress.

A job belongs to the console and not to a page, so a reload of the page loses nothing.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

from fastfedul.errors import FastFedULError, InvalidInputError
from fastfedul.federation.local import one_line

Kind = Literal["preview", "forget", "trace", "verify", "check"]
State = Literal["waiting", "running", "done", "failed"]
Say = Callable[[str, int, int], None]

KEPT_JOBS = 50
"""Jobs that the console remembers; results of a trace hold its examples."""


@dataclass(slots=True)
class Job:
    """A piece of work.

    Attributes:
        number: Jobs count from 1.
        kind: What it does.
        title: The same for people.
        about: Clients, or the file, that it is about.
        state: How far it is.
        stage: What it is doing now.
        done: Work done in this stage.
        total: Work of this stage; 0 if nobody knows.
        began: When it began, on the clock of the process.
        ended: When it ended.
        result: The result of a job that is done.
        error: Why it failed, in one line.
    """

    number: int
    kind: Kind
    title: str
    about: tuple[str, ...]
    state: State = "waiting"
    stage: str = "waiting"
    done: int = 0
    total: int = 0
    began: float = field(default_factory=time.monotonic)
    ended: float | None = None
    result: Any = None
    error: str | None = None

    @property
    def is_open(self) -> bool:
        """Whether it has not ended."""
        return self.state in ("waiting", "running")

    @property
    def seconds(self) -> float:
        """How long it takes, or took."""
        return (self.ended or time.monotonic()) - self.began

    def say(self, stage: str, done: int, total: int) -> None:
        """Note how far the work is."""
        self.stage, self.done, self.total = stage, done, total


class Jobs:
    """The jobs of a console, done one after the other by one thread."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._jobs: dict[int, Job] = {}
        self._lock = threading.Lock()
        self._worker = ThreadPoolExecutor(1, "fastfedul-console")

    def close(self) -> None:
        """Wait for the job that runs, and drop those that wait."""
        self._worker.shutdown(wait=True, cancel_futures=True)

    def start(
        self,
        kind: Kind,
        title: str,
        about: tuple[str, ...],
        work: Callable[[Say], Any],
    ) -> Job:
        """Return a new job that will do some work.

        Raises:
            InvalidInputError: If a client is being forgotten, and this is to forget
                another one; or if too many jobs wait.
        """
        with self._lock:
            if kind == "forget" and (other := self.forgetting()) is not None:
                names = ", ".join(other.about)
                raise InvalidInputError(
                    f"{names:.200} is being forgotten just now; wait for the end, or "
                    "file a request"
                )
            if sum(job.is_open for job in self._jobs.values()) >= KEPT_JOBS // 2:
                raise InvalidInputError("too many jobs wait; try again later")
            job = Job(next(self._numbers), kind, title, about)
            self._jobs[job.number] = job
            ended = [number for number, own in self._jobs.items() if not own.is_open]
            for number in ended[: max(0, len(self._jobs) - KEPT_JOBS)]:
                del self._jobs[number]
        self._worker.submit(_run, job, work)
        return job

    def find(self, number: int) -> Job | None:
        """Return a job; None if there never was one, or it is long over."""
        return self._jobs.get(number)

    def forgetting(self) -> Job | None:
        """Return the forgetting that has not ended; None if there is none."""
        open_jobs = (job for job in list(self._jobs.values()) if job.is_open)
        return next((job for job in open_jobs if job.kind == "forget"), None)

    def newest(self, kind: Kind) -> Job | None:
        """Return the newest job of a kind; None if there is none."""
        own = [job for job in list(self._jobs.values()) if job.kind == kind]
        return own[-1] if own else None

    def current(self) -> tuple[Job, ...]:
        """Return the jobs that have not ended."""
        return tuple(job for job in list(self._jobs.values()) if job.is_open)


def _run(job: Job, work: Callable[[Say], Any]) -> None:
    job.state, job.stage = "running", "beginning"
    try:
        job.result = work(job.say)
        job.state = "done"
    except FastFedULError as error:
        job.error, job.state = str(error), "failed"
    except Exception as error:
        # A user's own network may fail in any way; the console goes on.
        job.error, job.state = one_line(error), "failed"
    finally:
        job.ended = time.monotonic()
