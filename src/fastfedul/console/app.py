"""The console's pages and forms: a FastAPI application about one run or ledger."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI, File, Form, HTTPException, Request, UploadFile
from fastapi.exceptions import RequestValidationError
from fastapi.responses import (
    FileResponse,
    HTMLResponse,
    RedirectResponse,
    Response,
)
from fastapi.staticfiles import StaticFiles
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.exceptions import HTTPException as StarletteHTTPException

from fastfedul.console import views, work
from fastfedul.console.heat_map import LEVELS
from fastfedul.console.jobs import Job, Jobs, Kind, Say
from fastfedul.console.sessions import (
    Session,
    Sessions,
    has_secret,
    is_local,
    is_own_origin,
)
from fastfedul.errors import FastFedULError, InvalidInputError, UnknownClientError
from fastfedul.forgetting.requests import add_request, cancel_request
from fastfedul.ledger.reader import LedgerReader
from fastfedul.report import wording
from fastfedul.report.stored import read_comparison
from fastfedul.runs.status import age_of, status_in, writer_of
from fastfedul.watching import Metrics

LARGEST_UPLOAD = 256 * 2**20
"""Bytes of a request; the examples of a trace are far fewer."""

SHOWN_CLIENTS = 200
"""Clients to choose from on one page; a search finds the others."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # With `no-referrer`, browsers would hide the origin of the console's own forms.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
READ_ONLY = (
    "This browser may only look. Open the link that the console printed, with its "
    "token, to change something."
)
PAGES = (
    ("/", "Overview"),
    ("/clients", "Clients"),
    ("/forget", "Forget"),
    ("/compare", "Compare"),
    ("/trace", "Trace"),
    ("/certificates", "Certificates"),
    ("/storage", "Storage"),
)


class Console:
    """What the pages share: the ledger, the sessions and the jobs.

    Args:
        path: A run, or a ledger.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sessions = Sessions()
        self.jobs = Jobs()
        self.uploads = Path(tempfile.mkdtemp(prefix="fastfedul-console-"))
        self._reader = LedgerReader(path)
        self._lock = threading.Lock()

    def close(self) -> None:
        """Wait for the job that runs, and close the ledger."""
        self.jobs.close()
        self._reader.close()
        shutil.rmtree(self.uploads, ignore_errors=True)

    @contextmanager
    def look(self) -> Iterator[LedgerReader]:
        """Yield the ledger in one view; a page reads it for a moment."""
        with self._lock, self._reader.snapshot():
            yield self._reader

    def keep(self, upload: UploadFile | None) -> Path | None:
        """Return the file of an upload; None if the form had no file."""
        if upload is None or not upload.filename:
            return None
        # The name comes from a browser; it is only shown, and never a path.
        place = Path(tempfile.mkdtemp(dir=self.uploads)) / "upload.npz"
        with place.open("wb") as file:
            shutil.copyfileobj(upload.file, file)
        return place


def make_app(console: Console) -> FastAPI:
    """Return the application; its pages are about one run or ledger."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    folder = Path(__file__).parent / "static"
    app.mount("/static", StaticFiles(directory=folder), "static")
    pages = _Pages(console)
    app.middleware("http")(pages.guard)
    app.add_exception_handler(FastFedULError, pages.refuse)
    app.add_exception_handler(StarletteHTTPException, pages.fail)
    app.add_exception_handler(RequestValidationError, pages.fail)
    get = partial(app.get, response_class=HTMLResponse)
    get("/")(pages.overview)
    get("/part/overview")(pages.overview_part)
    get("/clients")(pages.clients)
    get("/part/clients")(pages.clients_part)
    get("/client")(pages.client)
    get("/forget")(pages.choose)
    get("/jobs/{number}")(pages.job)
    get("/part/jobs/{number}")(pages.job_part)
    get("/compare")(pages.compare)
    get("/trace")(pages.trace)
    get("/certificates")(pages.certificates)
    app.get("/certificates/{name}")(pages.download)
    get("/storage")(pages.storage)
    app.get("/metrics")(pages.metrics)
    post = partial(app.post, dependencies=[Depends(require_secret)])
    post("/forget/plan")(pages.start_plan)
    post("/forget/now")(pages.start_forgetting)
    post("/forget/request")(pages.file_requests)
    post("/requests/cancel")(pages.cancel)
    post("/requests/apply")(pages.start_answering)
    post("/trace")(pages.start_trace)
    post("/certificates/check")(pages.start_check)
    post("/storage/verify")(pages.start_verification)
    return app


def require_secret(request: Request, secret: Annotated[str, Form()] = "") -> None:
    """Raise unless a form carries the secret of its session."""
    session: Session = request.state.session
    if not has_secret(session, secret):
        raise HTTPException(403, "This form is of another session; load the page anew.")


class _Pages:
    """The functions behind the addresses."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._path = console.path
        self._environment = _environment()
        self._metrics = Metrics(console.path)

    # --- every request -------------------------------------------------------

    async def guard(
        self, request: Request, call: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        """Return the answer to a request that may be answered, with safe headers."""
        request.state.session = None
        response = self._refusal(request)
        if response is None:
            response = self._welcome(request)
        if response is None:
            response = await call(request)
        for name, value in HEADERS.items():
            response.headers[name] = value
        if request.url.path.startswith("/static/"):
            response.headers["Cache-Control"] = "no-cache"
        return response

    def _refusal(self, request: Request) -> Response | None:
        """Return why a request is refused; None if it is not."""
        host = request.headers.get("host")
        if not is_local(host):
            return self._told(
                request, 403, "This console answers only on this machine."
            )
        request.state.session = self._console.sessions.find(
            request.cookies.get(_cookie_name(request))
        )
        if request.method in ("GET", "HEAD"):
            return None
        if request.method != "POST":
            return self._told(request, 405, "There is no such thing to do.")
        if request.state.session is None:
            return self._told(request, 403, READ_ONLY)
        if not is_own_origin(request.headers.get("origin"), host):
            text = "This request came from another page, so it was refused."
            return self._told(request, 403, text)
        length = request.headers.get("content-length", "")
        if not length.isdecimal():
            return self._told(request, 411, "The request does not say how long it is.")
        if int(length) > LARGEST_UPLOAD:
            text = f"Files may have {wording.show_bytes(LARGEST_UPLOAD)} at most."
            return self._told(request, 413, text)
        return None

    def _welcome(self, request: Request) -> Response | None:
        """Return the way to the page for a browser that comes with the token."""
        token = request.query_params.get("token")
        if token is None:
            return None
        session = self._console.sessions.begin(token)
        if session is None:
            text = "This token is wrong; open the link that the console printed."
            return self._told(request, 403, text)
        # Without the token, so that it stays in no history and no bookmark.
        response = RedirectResponse(request.url.path, 303)
        response.set_cookie(
            _cookie_name(request), session.cookie, httponly=True, samesite="strict"
        )
        return response

    async def refuse(self, request: Request, error: Exception) -> Response:
        """Return the page of an error of the package: its one line."""
        code = 404 if isinstance(error, UnknownClientError) else 409
        return self._told(request, code, str(error))

    async def fail(self, request: Request, error: Exception) -> Response:
        """Return the page of a wrong address or form."""
        if isinstance(error, StarletteHTTPException):
            text = (
                "There is no such page." if error.status_code == 404 else error.detail
            )
            return self._told(request, error.status_code, text)
        return self._told(request, 422, "The form lacks something, or has it twice.")

    def _told(self, request: Request, code: int, text: str) -> Response:
        return self._page(request, "message.html.j2", code=code, text=text)

    def _page(
        self, request: Request, template: str, *, code: int = 200, **facts: Any
    ) -> HTMLResponse:
        session: Session | None = request.state.session
        html = self._environment.get_template(template).render(
            facts,
            code=code,
            secret=None if session is None else session.form_secret,
            name=self._path.absolute().name,
            pages=PAGES,
            here=request.url.path,
            jobs=self._console.jobs.current(),
            read_only=READ_ONLY,
        )
        return HTMLResponse(html, code)

    def _part(
        self, request: Request, template: str, seen: str | None, **facts: Any
    ) -> Response:
        """Return a part of a page; nothing if the browser shows it already."""
        session: Session | None = request.state.session
        html = self._environment.get_template(template).render(
            facts, secret=None if session is None else session.form_secret
        )
        digest = hashlib.sha256(html.encode()).hexdigest()[:16]
        if seen == digest:
            return Response(status_code=204)
        return HTMLResponse(html, headers={"X-Part": digest})

    def _with_part(
        self, request: Request, template: str, part: Response, **facts: Any
    ) -> HTMLResponse:
        """Return a page around a part that follows the ledger."""
        return self._page(
            request,
            template,
            part=bytes(part.body).decode(),
            seen=part.headers["X-Part"],
            **facts,
        )

    def _begin(
        self, kind: Kind, title: str, about: tuple[str, ...], do: Callable[[Say], Any]
    ) -> Response:
        job = self._console.jobs.start(kind, title, about, do)
        return RedirectResponse(f"/jobs/{job.number}", 303)

    # --- looking -------------------------------------------------------------

    def metrics(self, request: Request) -> Response:
        """Return the metrics for Prometheus; they name no client."""
        text, kind = self._metrics.text(request.headers.get("accept", ""))
        return Response(text, media_type=kind)

    def overview(self, request: Request) -> Response:
        """Return the overview."""
        part = self.overview_part(request)
        return self._with_part(request, "overview.html.j2", part, title="Overview")

    def overview_part(self, request: Request, seen: str | None = None) -> Response:
        """Return the part of the overview that follows the ledger."""
        with self._console.look() as ledger:
            status = status_in(ledger, self._path)
            names = [u.client for u in ledger.updates_in(ledger.num_rounds - 1)]
        main, attack = views.accuracy_of(self._path)
        return self._wrapped(
            request,
            seen,
            "overview",
            "/part/overview",
            4,
            status=status,
            names=names,
            main=main,
            attack=attack,
        )

    def _wrapped(
        self,
        request: Request,
        seen: str | None,
        part: str,
        address: str,
        every: int,
        **facts: Any,
    ) -> Response:
        """Return a part in the element that asks for it again."""
        inner = self._part(request, f"_{part}.html.j2", seen, **facts)
        if inner.status_code == 204:
            return inner
        digest = inner.headers["X-Part"]
        html = self._environment.get_template("_live.html.j2").render(
            part=part,
            address=f"{address}{'&' if '?' in address else '?'}seen={digest}",
            every=every,
            inner=bytes(inner.body).decode(),
        )
        return HTMLResponse(html, headers={"X-Part": digest})

    def clients(self, request: Request, find: str = "", page: int = 1) -> Response:
        """Return the clients, with who took part when."""
        part = self.clients_part(request, find, page)
        return self._with_part(
            request, "clients.html.j2", part, title="Clients", find=find
        )

    def clients_part(
        self, request: Request, find: str = "", page: int = 1, seen: str | None = None
    ) -> Response:
        """Return the part of the clients that follows the ledger."""
        with self._console.look() as ledger:
            found = views.client_page(ledger, find, page)
        filters = self._environment.filters
        address = f"/part/clients?find={filters['urlencode'](find)}&page={found.page}"
        return self._wrapped(
            request, seen, "clients", address, 6, found=found, find=find, levels=LEVELS
        )

    def client(self, request: Request, name: str) -> Response:
        """Return the page of one client."""
        with self._console.look() as ledger:
            facts = views.client_facts(ledger, name)
            holdings = None
            if facts.entry.state != "active":
                holdings = views.holdings_of(ledger, self._path, name)
        plans = self._console.jobs.newest("preview")
        own = plans if plans is not None and plans.about == (name,) else None
        return self._page(
            request,
            "client.html.j2",
            title=wording.show_name(name),
            facts=facts,
            holdings=holdings,
            plan=own,
        )

    def choose(
        self,
        request: Request,
        find: str = "",
        client: Annotated[list[str] | None, Depends(_clients_of)] = None,
    ) -> Response:
        """Return the page on which clients to forget are chosen."""
        chosen = set(client or ())
        with self._console.look() as ledger:
            entries = views.matching(ledger, find, ("active",))
        first = [entry for entry in entries if entry.client in chosen]
        rest = [entry for entry in entries if entry.client not in chosen]
        return self._page(
            request,
            "forget.html.j2",
            title="Forget",
            entries=[*first, *rest][:SHOWN_CLIENTS],
            found=len(entries),
            chosen=chosen,
            find=find,
            writer=writer_of(self._reader_path),
        )

    @property
    def _reader_path(self) -> Path:
        with self._console.look() as ledger:
            return ledger.path

    def job(self, request: Request, number: int) -> Response:
        """Return the page of a job."""
        job = self._job(number)
        part = self.job_part(request, number)
        return self._with_part(request, "job.html.j2", part, title=job.title, job=job)

    def job_part(
        self, request: Request, number: int, seen: str | None = None
    ) -> Response:
        """Return how far a job is, or its result."""
        job = self._job(number)
        return self._wrapped(
            request,
            seen,
            "job",
            f"/part/jobs/{number}",
            1 if job.is_open else 0,
            job=job,
            phrase=None if job.kind != "preview" else _phrase(job),
            writer=writer_of(self._reader_path),
        )

    def _job(self, number: int) -> Job:
        job = self._console.jobs.find(number)
        if job is None:
            raise HTTPException(404)
        return job

    def compare(self, request: Request) -> Response:
        """Return the newest comparison that was kept, and the metrics by round."""
        kept = read_comparison(self._path)
        main, attack = views.accuracy_of(self._path)
        with self._console.look() as ledger:
            stages = views.lineage_of(ledger)
        return self._page(
            request,
            "compare.html.j2",
            title="Compare",
            kept=kept,
            rows=[] if kept is None else views.usable_rows(kept),
            main=main,
            attack=attack,
            stages=stages,
        )

    def trace(self, request: Request) -> Response:
        """Return the page that takes a file of bad inputs."""
        return self._page(
            request,
            "trace.html.j2",
            title="Trace",
            newest=self._console.jobs.newest("trace"),
        )

    def certificates(self, request: Request) -> Response:
        """Return the certificates and the lineage of the models."""
        with self._console.look() as ledger:
            found = views.certificates_of(ledger)
            stages = views.lineage_of(ledger)
        return self._page(
            request,
            "certificates.html.j2",
            title="Certificates",
            certificates=found,
            stages=stages,
        )

    def download(self, name: str) -> Response:
        """Return the file of a certificate."""
        with self._console.look() as ledger:
            own = views.find_certificate(ledger, name)
        return FileResponse(
            own.file, media_type="application/json", filename=own.file.name
        )

    def storage(self, request: Request) -> Response:
        """Return where the bytes are, and what still has erased clients."""
        with self._console.look() as ledger:
            found = views.storage_of(ledger)
            erased = {
                entry.client: views.holdings_of(ledger, self._path, entry.client)
                for entry in found.erased[:20]
            }
            status = status_in(ledger, self._path)
        return self._page(
            request,
            "storage.html.j2",
            title="Storage",
            found=found,
            erased=erased,
            status=status,
            newest=self._console.jobs.newest("verify"),
        )

    # --- doing ---------------------------------------------------------------

    def start_plan(
        self,
        client: Annotated[list[str] | None, Form()] = None,
        validation: Annotated[UploadFile | None, File()] = None,
    ) -> Response:
        """Compute what forgetting the chosen clients would do."""
        names = tuple(dict.fromkeys(client or ()))
        if not names:
            raise InvalidInputError("choose at least one client to forget")
        with self._console.look() as ledger:
            _require_known(ledger, names)
        file = self._console.keep(validation)
        return self._begin(
            "preview",
            "Preview of forgetting",
            names,
            _then_remove(file, partial(work.plan, self._path, names, file)),
        )

    def start_forgetting(
        self,
        plan: Annotated[int, Form()],
        typed: Annotated[str, Form()] = "",
        erase: Annotated[str, Form()] = "",
    ) -> Response:
        """Forget the clients of a preview for good."""
        job = self._planned(plan)
        if typed.strip() not in _confirmations(job):
            raise InvalidInputError(
                f"to confirm, type {_phrase(job)!r:.80} exactly; nothing was done"
            )
        return self._begin(
            "forget",
            "Forgetting",
            job.about,
            partial(work.forget_now, self._path, job.about, erase == "yes"),
        )

    def file_requests(
        self,
        plan: Annotated[int, Form()],
        reason: Annotated[str, Form()] = "",
    ) -> Response:
        """File a request for each client of a preview."""
        for name in self._planned(plan).about:
            add_request(self._path, name, reason.strip() or None)
        return RedirectResponse("/#requests", 303)

    def _planned(self, number: int) -> Job:
        job = self._job(number)
        if job.kind != "preview" or job.state != "done":
            raise InvalidInputError("make a preview first, and read it")
        return job

    def cancel(self, request: Annotated[int, Form(alias="number")]) -> Response:
        """Cancel a waiting request."""
        cancel_request(self._path, request)
        return RedirectResponse("/#requests", 303)

    def start_answering(self) -> Response:
        """Answer the waiting requests."""
        with self._console.look() as ledger:
            names = tuple(request.client for request in ledger.waiting())
        return self._begin(
            "forget",
            "Answering the requests",
            names,
            partial(work.answer_requests, self._path),
        )

    def start_trace(self, inputs: Annotated[UploadFile, File()]) -> Response:
        """Trace the inputs of a file to clients."""
        file = self._console.keep(inputs)
        if file is None:
            raise InvalidInputError("choose a file of inputs, an .npz file")
        return self._begin(
            "trace",
            "Tracing unwanted answers",
            (inputs.filename or "file",),
            _then_remove(file, partial(work.rank, self._path, file)),
        )

    def start_check(self, name: Annotated[str, Form()]) -> Response:
        """Check a certificate."""
        with self._console.look() as ledger:
            views.find_certificate(ledger, name)
        return self._begin(
            "check",
            "Checking a certificate",
            (name,),
            partial(work.check, self._path, name),
        )

    def start_verification(self) -> Response:
        """Compare every byte of the ledger with its digest."""
        return self._begin(
            "verify",
            "Verifying the ledger",
            (),
            partial(work.verify_all, self._path),
        )


def _then_remove(file: Path | None, do: Callable[[Say], Any]) -> Callable[[Say], Any]:
    """Return work that removes an upload at its end."""

    def done(say: Say) -> Any:
        try:
            return do(say)
        finally:
            if file is not None:
                shutil.rmtree(file.parent, ignore_errors=True)

    return done


def _clients_of(request: Request) -> list[str]:
    """Return the clients that an address names."""
    return request.query_params.getlist("client")


def _require_known(ledger: LedgerReader, names: tuple[str, ...]) -> None:
    for name in names:
        if ledger.client(name) is None:
            raise UnknownClientError(f"no client is called {name!r:.80} in this ledger")


def _phrase(job: Job) -> str:
    """Return what an operator types to confirm a forgetting."""
    if len(job.about) > 1:
        return f"forget {len(job.about)} clients"
    return wording.show_name(job.about[0])


def _confirmations(job: Job) -> set[str]:
    return {_phrase(job), *(job.about if len(job.about) == 1 else ())}


def _cookie_name(request: Request) -> str:
    # Cookies know no ports, and two consoles may run on one machine.
    return f"fastfedul-{request.url.port or 80}"


def _environment() -> Environment:
    found = Environment(
        loader=PackageLoader("fastfedul.console"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters.update(
        person=wording.show_name,
        short=wording.shorten,
        share=wording.show_share,
        seconds=wording.show_seconds,
        bytes=wording.show_bytes,
        ago=_show_age,
        moment=_show_time,
    )
    return found


def _show_time(time: str) -> str:
    """Return a time of the ledger as people read it.

    >>> _show_time("2026-01-02T03:04:05+00:00")
    '2026-01-02 03:04 UTC'
    """
    return f"{time[:10]} {time[11:16]} UTC"


def _show_age(time: str) -> str:
    """Return how long ago a time was, in its largest unit."""
    try:
        age = age_of(time)
    except ValueError:
        return time
    for unit, size in (
        ("day", timedelta(days=1)),
        ("hour", timedelta(hours=1)),
        ("minute", timedelta(minutes=1)),
    ):
        count = age // size
        if count >= 1:
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"
