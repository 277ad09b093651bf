"""Does the server answer its own page, and nobody and nothing else?"""

from __future__ import annotations

import contextlib
import http.client
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pages import make_run, matrix
from served import unpack

from kizuki.explorer import PageError
from kizuki.explorer.answers import Answers
from kizuki.explorer.heads import Stale
from kizuki.explorer.server import HOST, QUERY_LIMIT, Server

MARKUP = ['</script><img src=x onerror="document.title=1">', "<b>", "\u2028", *[f"w{i} " for i in range(34)]]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(Answers(make_run({0: matrix(), 5: matrix(seed=2)}, MARKUP))).running() as running:
        yield running


def get(
    server: Server, path: str, headers: dict[str, str] | None = None, method: str = "GET"
) -> tuple[int, http.client.HTTPMessage, bytes]:
    """One request, its path as it is: nothing cleans it up on the way."""
    line = http.client.HTTPConnection(HOST, server.port, timeout=60)
    line._validate_path = lambda url: None  # type: ignore[attr-defined] # tricks are the point here
    try:
        line.request(method, path, headers=headers or {})
        answer = line.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        line.close()


def refused(status: int, body: bytes, wanted: int | set[int]) -> str:
    """A short line with an id, and nothing about the inside."""
    assert status in (wanted if isinstance(wanted, set) else {wanted}), (status, body[:300])
    text = body.decode()
    assert len(text) < 500
    assert "Traceback" not in text
    assert ".py" not in text
    assert re.search(r"\([0-9a-f]{8}\)$", text), text
    return text


def test_the_page_its_data_and_its_headers(server: Server) -> None:
    base = f"/{server.token}/"
    assert server.address == f"http://127.0.0.1:{server.port}{base}"
    for path, kind in {"": "text/html", "main.js": "text/javascript", "page.css": "text/css"}.items():
        status, headers, body = get(server, base + path)
        assert (status, headers["content-type"]) == (200, f"{kind}; charset=utf-8")
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "*" not in policy
        assert "frame-ancestors 'none'" in policy
        assert re.findall(r"(?:script|style|connect)-src ([^;]*)", policy) == ["'self'"] * 3
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"
        assert "server" not in headers
        if not path:  # no data in the page, and nothing in it that runs but its own files
            assert b"w33" not in body
            assert re.findall(rb"<script[^>]*>", body) == [b'<script src="main.js">']
    status, headers, body = get(server, base + "data/row?layer=5&head=3&query=20")
    assert (status, headers["content-type"]) == (200, "application/octet-stream")
    row = server.answers.matrices[5][0, 3, 20]
    assert np.allclose(unpack(body)["weights"], row, rtol=2e-5, atol=1e-6)
    meta = unpack(get(server, base + "data/meta")[2])["meta"]
    assert meta["tokens"]["texts"] == MARKUP  # as text in JSON; the page makes text nodes of it
    assert get(server, base, method="HEAD")[2] == b""


def test_who_does_not_know_the_token_finds_nothing(server: Server) -> None:
    token = server.token
    assert len(token) >= 32
    near = (f"/{token[:-1]}/", f"/{token}x/data/meta", f"/{token.swapcase()}/", f"/{token}")
    for path in ("/", "/data/meta", "/main.js", *near):
        assert token not in refused(*get(server, path)[::2], 404)
    assert Server(Answers(make_run({0: matrix(5)}))).token != token


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "example.org"}, 421),
        ({"Host": "127.0.0.1"}, 421),
        ({"Host": "127.0.0.1.example.org"}, 421),
        ({"Host": ""}, 421),
        ({"Origin": "https://example.org"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
    ],
)
def test_another_host_or_origin_is_refused_though_it_has_the_token(
    server: Server, headers: dict[str, str], status: int
) -> None:
    refused(*get(server, f"/{server.token}/data/meta", headers)[::2], status)
    own = {"Host": f"127.0.0.1:{server.port}", "Origin": f"http://127.0.0.1:{server.port}"}
    assert get(server, f"/{server.token}/data/meta", own | {"Sec-Fetch-Site": "same-origin"})[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        "../../../etc/passwd",
        "..%2f..%2f..%2fetc%2fpasswd",
        "%2e%2e/%2e%2e/etc/passwd",
        "....//....//etc/passwd",
        "/etc/passwd",
        "//etc/passwd",
        "C:\\windows\\win.ini",
        "..\\..\\pyproject.toml",
        "main.js%00.css",
        "main.js/",
        "main%2ejs",
        "static/main.js",
        "page.py",
        "data/",
        "data/../main.js",
        "file:///etc/passwd",
    ],
)
def test_no_spelling_of_a_path_leads_out(server: Server, path: str) -> None:
    text = refused(*get(server, f"/{server.token}/{path}")[::2], {400, 404})
    assert "root:" not in text


@pytest.mark.parametrize(
    ("question", "status", "message"),
    [
        ("row?layer=0&head=0", 400, "query: is missing; give a whole number in 0 … 36"),
        ("row?layer=0&head=0&query=99", 400, "query: is 99 but must be in 0 … 36"),
        ("row?layer=0&head=0&query=1&query=2", 400, "a parameter is given twice"),
        ("tile?layer=0&head=0&zoom=0&row=0&col=9", 400, "tile: is (0, 9) but"),
        ("row?layer=0&head=0&query=%3Cimg%20src=x%3E", 400, "query: is '<img src=x>' but"),
        ("row?layer=0&head=0&query=%00", 400, "query: is '\\x00' but"),
        ("nonsense?x=1", 400, "'nonsense': no such question"),
        (f"row?layer={'9' * QUERY_LIMIT}", 414, "the address has 2,"),
    ],
)
def test_bad_questions_get_a_short_message_and_an_id(
    server: Server, question: str, status: int, message: str
) -> None:
    found, headers, body = get(server, f"/{server.token}/data/{question}")
    assert refused(found, body, status).startswith(message)
    assert headers["content-type"] == "text/plain; charset=utf-8"  # markup in a question stays text
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        refused(*get(server, f"/{server.token}/data/meta", method=method)[::2], 405)


def test_ten_million_characters_are_refused_and_the_server_lives(server: Server) -> None:
    with socket.create_connection((HOST, server.port), timeout=60) as line:
        begin = f"GET /{server.token}/data/row?layer=".encode()
        with contextlib.suppress(OSError):  # it may be hung up on, which is an answer too
            line.sendall(begin + b"9" * 10_000_000 + b" HTTP/1.1\r\n\r\n")
        try:
            answer = line.recv(10_000)
        except ConnectionResetError:
            answer = b""
        assert answer == b"" or answer.startswith(b"HTTP/1.1 4")
        assert b"Traceback" not in answer
    assert get(server, f"/{server.token}/data/meta")[0] == 200


def test_two_hundred_requests_at_once_are_all_answered(server: Server) -> None:
    def one(at: int) -> bool:
        status, _, body = get(server, f"/{server.token}/data/row?layer=0&head={at % 4}&query={at % 37}")
        row = server.answers.matrices[0][0, at % 4, at % 37].numpy()
        return status == 200 and np.allclose(unpack(body)["weights"], row, rtol=2e-5, atol=1e-6)

    with ThreadPoolExecutor(200) as crowd:
        assert all(crowd.map(one, range(200)))


def test_work_for_a_client_that_is_gone_stops(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, stopped = threading.Event(), threading.Event()

    def endless(parameters: Any, gone: Any) -> dict[str, Any]:
        begun.set()
        for _ in range(3000):
            if gone():
                stopped.set()
                raise Stale
            time.sleep(0.01)
        return {}

    monkeypatch.setitem(server.answers._asked, "tile", endless)
    line = socket.create_connection((HOST, server.port), timeout=60)
    line.sendall(f"GET /{server.token}/data/tile HTTP/1.1\r\nHost: {HOST}:{server.port}\r\n\r\n".encode())
    assert begun.wait(20)
    line.close()
    assert stopped.wait(20)
    assert get(server, f"/{server.token}/data/meta")[0] == 200


def test_a_computation_that_fails_says_no_more_than_that(
    server: Server, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails(parameters: Any, gone: Any) -> dict[str, Any]:
        raise RuntimeError("secret inside")

    def breaks(parameters: Any, gone: Any) -> dict[str, Any]:
        return {"x": {1, 2}}  # no JSON: a fault of our own

    monkeypatch.setitem(server.answers._asked, "tile", fails)
    monkeypatch.setitem(server.answers._asked, "band", breaks)
    for what in ("tile", "band"):
        assert "secret" not in refused(*get(server, f"/{server.token}/data/{what}")[::2], 500)


def test_it_listens_on_this_machine_only_and_a_taken_port_is_refused(server: Server) -> None:
    assert server.socket.getsockname()[0] == "127.0.0.1"
    with pytest.raises(PageError, match=f"^port {server.port}: cannot be had"):
        Server(server.answers, server.port)


def test_the_command_serves_a_saved_recording_until_it_is_stopped(tmp_path: Path) -> None:
    from kizuki.models.recording import Capture, Recording
    from kizuki.models.rule import Rule
    from kizuki.models.tokens import Tokens

    made = matrix(20)
    recording = Recording("tiny", [0], None)
    words = [f"w{i} " for i in range(20)]
    ends = np.cumsum([len(word) for word in words]).tolist()
    offsets = list(zip([0, *ends[:-1]], ends, strict=True))
    recording.tokens = Tokens("".join(words), list(range(20)), offsets, words, [False] * 20)
    recording._captures = {
        0: Capture("layer", made.query, made.key, made.key, None, None, None, [Rule(20, right=0)], [], None)
    }
    path = recording.save(tmp_path / "tiny.safetensors")
    command = [sys.executable, "-m", "kizuki", "look", str(path), "--serve", "--no-open"]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert job.stdout
        address = job.stdout.readline().strip()
        found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)(/[\w-]{32}/)", address)
        assert found, address
        line = http.client.HTTPConnection(HOST, int(found[1]), timeout=60)
        line.request("GET", f"{found[2]}data/row?layer=0&head=1&query=9")
        weights = unpack(line.getresponse().read())["weights"]
        line.close()
        job.send_signal(signal.SIGINT)
        _, said = job.communicate(timeout=30)
    finally:
        job.kill()
        job.communicate()
    assert torch.allclose(torch.tensor(weights), made[0, 1, 9], rtol=2e-5, atol=1e-6)
    assert "20 tokens, 1 layers × 4 heads" in said
    assert "Traceback" not in said
    wrong = subprocess.run([*command, "--out", "x.html"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "--out is for a page that is written, and --serve writes none; leave it out" in wrong.stderr
