"""`kizuki look --serve`: the page from a server on this machine, which computes what the page asks for.

It listens on 127.0.0.1 only. Its address holds a token that is made anew at every start, and every path below it:
without the token there is nothing here. A request must name this server as its Host and, where a browser says where it
comes from, this server as its Origin; so neither another page nor a name that is pointed at 127.0.0.1 reaches the data.
It serves the front end's own files, by a table and not from a folder, and answers the questions of `answers.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from ..extras import absent
from . import bundle
from .answers import Answers, QuestionError
from .export import PageError
from .heads import Stale

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

HOST = "127.0.0.1"
NEEDS = "the server needs starlette and uvicorn"
QUERY_LIMIT = 2_000  # characters of a path with its question; the longest that the page asks has about 150
AT_ONCE = 4  # questions that are worked on at the same time; the others wait
LOOK_AGAIN = 0.05  # seconds between two looks at whether somebody still waits

log = logging.getLogger(__name__)


def application(answers: Answers, token: str, port: int, closing: threading.Event | None = None) -> Starlette:
    """The server's application, for the one address `http://127.0.0.1:{port}/{token}/`.

    Once `closing` is set, whatever is being computed stops at its next look.

    Raises `PageError` where starlette is not installed.
    """
    try:
        from starlette.applications import Starlette
        from starlette.responses import Response
        from starlette.routing import Route
    except (ImportError, OSError) as error:
        raise PageError(absent(error, NEEDS, "explorer")) from None

    script, style, html = bundle.script("main.js", "live"), bundle.style("page.css"), _html()
    policy = (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "content-security-policy": policy,
        "cache-control": "no-store",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "x-frame-options": "DENY",
    }
    files = {
        "": (html, "text/html; charset=utf-8"),
        "page.css": (style, "text/css; charset=utf-8"),
        "main.js": (script, "text/javascript; charset=utf-8"),
    }
    places = asyncio.Semaphore(AT_ONCE)
    threads = torch.get_num_threads()
    # A thread takes its number of threads from whoever set one last, which may be a tile: so it is said to each.
    workers = ThreadPoolExecutor(AT_ONCE, "kizuki answer", lambda: torch.set_num_threads(threads))

    def refuse(status: int, message: str) -> Response:
        """A short message and an id by which the log has more."""
        number = secrets.token_hex(4)
        log.info("request %s: %d %s", number, status, message)
        text = f"{message} ({number})"
        return Response(text, status, headers, media_type="text/plain; charset=utf-8")

    def refused(request: Request) -> Response | None:
        hosts = {f"{HOST}:{port}", f"localhost:{port}"}
        if request.headers.get("host", "") not in hosts:
            return refuse(421, "this server answers to its own address only")
        origin = request.headers.get("origin")
        if origin is not None and origin not in {f"http://{host}" for host in hosts}:
            return refuse(403, "another page may not ask here")
        if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return refuse(403, "another page may not ask here")
        length = len(request.scope.get("raw_path") or b"") + len(request.scope.get("query_string") or b"")
        if length > QUERY_LIMIT:
            return refuse(414, f"the address has {length:,} characters; at most {QUERY_LIMIT:,} are read")
        return None

    async def everything(request: Request) -> Response:
        if (response := refused(request)) is not None:
            return response
        raw: bytes = request.scope.get("raw_path") or b""
        # The path as it came: nothing in it is decoded, so that no spelling of it can mean another one.
        parts = raw.split(b"?")[0].decode("latin-1").split("/", 2)
        given = parts[1] if len(parts) > 1 else ""
        if len(parts) != 3 or not hmac.compare_digest(given.encode("latin-1"), token.encode("ascii")):
            return refuse(
                404, "nothing is here; open the address that kizuki look --serve printed, token and all"
            )
        if request.method not in ("GET", "HEAD"):
            return refuse(405, "only GET is answered")
        path = parts[2]
        if path in files:
            text, kind = files[path]
            return Response(text, headers=headers | {"content-type": kind})
        if path.startswith("data/"):
            return await answer(request, path.removeprefix("data/"))
        return refuse(404, "no such file")

    async def answer(request: Request, what: str) -> Response:
        pairs = request.query_params.multi_items()
        parameters = dict(pairs)
        if len(parameters) != len(pairs):
            return refuse(400, "a parameter is given twice")
        gone = threading.Event()

        def stale() -> bool:
            return gone.is_set() or (closing is not None and closing.is_set())

        async with places:
            work = asyncio.get_running_loop().run_in_executor(workers, answers.ask, what, parameters, stale)
            try:
                while not work.done():
                    await asyncio.wait({work}, timeout=LOOK_AGAIN)
                    if not work.done() and not gone.is_set() and await request.is_disconnected():
                        gone.set()
                return Response(work.result(), headers=headers, media_type="application/octet-stream")
            except Stale:
                return refuse(499, "nobody waits for this any more")
            except QuestionError as error:
                return refuse(400, str(error))
            except (
                ValueError,
                MemoryError,
                RuntimeError,
            ) as error:
                log.error("%s: %s", what, " ".join(str(error).split()))
                return refuse(500, "this could not be computed; the terminal says more")
            finally:
                gone.set()  # the request was dropped: the thread stops at its next look

    @contextlib.asynccontextmanager
    async def life(app: Starlette) -> AsyncIterator[None]:
        answers.reader.begin()
        yield
        await asyncio.to_thread(answers.reader.close)
        workers.shutdown(wait=False, cancel_futures=True)

    async def fault(request: Request, error: Exception) -> Response:
        return refuse(500, "a fault of kizuki's own; the terminal says more")

    routes = [
        Route(
            "/{path:path}", everything, methods=["GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"]
        )
    ]
    return Starlette(routes=routes, lifespan=life, exception_handlers={Exception: fault})


def _html() -> str:
    """The page without data: its script asks for everything."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n<title>kizuki</title>\n<link rel="stylesheet" href="page.css">\n'
        f'</head>\n<body>\n{bundle.read("page.html")}<script src="main.js"></script>\n</body>\n</html>\n'
    )


class Server:
    """A server around `answers`, bound at once, so that its address is known before it runs.

    Args:
        answers: what it serves.
        port: 0 = one that is free.

    Raises:
        PageError: the port cannot be had, or uvicorn is not installed.
    """

    def __init__(self, answers: Answers, port: int = 0) -> None:
        try:
            import uvicorn
        except (ImportError, OSError) as error:
            raise PageError(absent(error, NEEDS, "explorer")) from None
        self.answers = answers
        self.token = secrets.token_urlsafe(24)
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self.socket.bind((HOST, port))
            self.socket.listen(128)  # who comes before `run` waits a moment and is not turned away
        except OSError as error:
            self.socket.close()
            raise PageError(f"port {port}: cannot be had ({error.strerror}); give another, or none") from None
        self.port: int = self.socket.getsockname()[1]
        closing = threading.Event()

        class Stopping(uvicorn.Server):
            async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
                closing.set()  # nobody waits for a picture any more
                await super().shutdown(sockets)

        config = uvicorn.Config(
            application(answers, self.token, self.port, closing),
            log_level="warning",
            access_log=False,
            server_header=False,
            lifespan="on",
            timeout_graceful_shutdown=2,
        )
        self._server = Stopping(config)

    @property
    def address(self) -> str:
        """Where the page is, the token in it."""
        return f"http://{HOST}:{self.port}/{self.token}/"

    def run(self) -> None:
        """Serve until stopped (Ctrl-C, or `stop` from another thread)."""
        self._server.run(sockets=[self.socket])

    def stop(self) -> None:
        """Let `run` return."""
        self._server.should_exit = True

    @contextlib.contextmanager
    def running(self) -> Iterator[Server]:
        """Serve on a thread of its own for the length of a `with` block."""
        thread = threading.Thread(target=self.run, name="kizuki server", daemon=True)
        thread.start()
        try:
            while not self._server.started and thread.is_alive():
                thread.join(0.01)
            yield self
        finally:
            self.stop()
            thread.join()
