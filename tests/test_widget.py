"""Does a notebook's cell show what Python computes? Its own script runs in a browser, the kernel's side is ours."""

from __future__ import annotations

import base64
import math
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pages import make_run, matrix, table
from served import unpack

from kizuki.explorer import BudgetError, PageError, bundle
from kizuki.explorer.answers import Answers
from kizuki.explorer.widget import Conversation, document, widget
from kizuki.models import RecordError
from kizuki.models.recording import Capture, Recording
from kizuki.models.rule import Rule
from kizuki.models.tokens import Tokens


def recording(count: int = 37, layers: int = 2, **options: Any) -> Recording:
    """A real recording of random q, k, v."""
    made = Recording("tiny", list(range(layers)), None)
    words = [f"w{i} " for i in range(count)]
    ends = np.cumsum([len(word) for word in words]).tolist()
    offsets = list(zip([0, *ends[:-1]], ends, strict=True))
    made.tokens = Tokens("".join(words), list(range(count)), offsets, words, [False] * count)
    for layer in range(layers):
        a = matrix(count, seed=layer, **options)
        made._captures[layer] = Capture(
            "layer", a.query, a.key, a.key, None, None, None, [Rule(count, right=0)], [], None
        )
    return made


def test_a_message_gets_the_answer_or_one_line() -> None:
    made = matrix()
    talk = Conversation(Answers(make_run({0: made})))
    asked = {"view": "a", "id": 7, "what": "row", "parameters": {"layer": 0, "head": 1, "query": 20}}
    content, (data,) = talk.reply(asked) or ({}, [b""])
    assert content == {"view": "a", "id": 7}
    assert np.allclose(unpack(data)["weights"], made[0, 1, 20], rtol=2e-5, atol=1e-6)
    content, buffers = talk.reply({**asked, "parameters": {"layer": 0, "head": 1, "query": 99}}) or ({}, [])
    assert content == {"view": "a", "id": 7, "error": "query: is 99 but must be in 0 … 36"}
    assert buffers == []
    content, _ = talk.reply({**asked, "parameters": ["layer"]}) or ({}, [])
    assert content["error"] == "parameters: must be names and values"
    for nothing in (None, "row", {}, {"id": 1, "what": "row"}, {"view": "a", "id": "1", "what": "row"}):
        assert talk.reply(nothing) is None


def test_the_frames_document_loads_nothing_and_says_so() -> None:
    page = document()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy
    assert "default-src 'none'" in policy[1]
    assert "unsafe" not in policy[1]
    assert "connect-src" not in policy[1]
    assert not re.findall(r"\bsrc=|https?://", page)


def test_show_is_a_widget_that_answers_and_refuses_what_it_cannot_show() -> None:
    made = recording()
    shown = made.show(height=400)
    try:
        assert shown.height == 400
        assert shown.page == document()
        sent: list[Any] = []
        shown.send = lambda content, buffers=None: sent.append((content, buffers))
        shown._handle_custom_msg({"view": "v", "id": 1, "what": "meta", "parameters": {}}, [])
        ((content, (data,)),) = sent
        assert content == {"view": "v", "id": 1}
        assert unpack(data)["meta"]["model"] == "tiny"
    finally:
        shown.close()
    with pytest.raises(PageError, match="height is 10 but must be a whole number of pixels"):
        widget(shown.conversation.answers, height=10)
    with pytest.raises(
        RecordError, match=r"recording\.show: other is a str but must be a Recording; kizuki.open"
    ):
        made.show(other="b.safetensors")
    with pytest.raises(
        RecordError, match=r"recording\.show: source is a str but must be a Source; kizuki.models.load"
    ):
        made.show(source="smollm2")
    made.tokens = None
    with pytest.raises(RecordError, match=r"recording\.show: it holds no tokens"):
        made.show()


def test_save_html_writes_the_page_and_names_what_it_leaves_out(tmp_path: Path) -> None:
    made = recording(300, layers=4, dim=64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # everything fits, and nothing is said
        whole = made.save_html(tmp_path / "whole.html")
    limit = whole.stat().st_size / 1e6 * 0.7
    with pytest.warns(
        UserWarning, match=r"holds readings, but not q and k, of layers [\d, –]+ \(limit_mb is"
    ):
        part = made.save_html(tmp_path / "part.html", limit_mb=limit, first=[2])
    assert part.stat().st_size <= limit * 1e6
    assert 'id="kz-q-2-0"' in part.read_text()
    with pytest.raises(BudgetError):
        made.save_html(tmp_path / "none.html", limit_mb=0.01)
    made.tokens = None
    with pytest.raises(RecordError, match=r"recording\.save_html: it holds no tokens"):
        made.save_html(tmp_path / "none.html")


def test_anywidget_is_loaded_when_it_is_used() -> None:
    names = "'anywidget' in sys.modules, 'starlette' in sys.modules"
    code = f"import sys, kizuki.models, kizuki.explorer.widget; print({names})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


FAKE = """
async ([esm, html]) => {
  const listeners = [];
  globalThis.traits = { page: html, height: 700 };
  globalThis.model = {
    get: (name) => traits[name],
    on: (name, call) => listeners.push([name, call]),
    off: (name, call) => {
      const at = listeners.findIndex(([n, c]) => n === name && c === call);
      if (at >= 0) listeners.splice(at, 1);
    },
    send: async (content) => {
      const [back, texts] = await kernel(content);
      const buffers = texts.map((text) => new DataView(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer));
      for (const [name, call] of [...listeners]) if (name === "msg:custom") call(back, buffers);
    },
  };
  globalThis.listeners = listeners;
  const module = await import(URL.createObjectURL(new Blob([esm], { type: "text/javascript" })));
  document.body.innerHTML = '<div id="one"></div><div id="two"></div>';
  globalThis.leave = ["one", "two"].map((id) => module.default.render({ model, el: document.getElementById(id) }));
}
"""

READY = """() => { const p = globalThis.kizukiPage; return p && !p.busy && p.pictures.check !== null; }"""


@pytest.mark.browser
def test_the_cell_shows_the_kernels_numbers(browser: Any) -> None:
    made = {0: matrix(), 5: matrix(seed=2)}
    talk = Conversation(Answers(make_run(made)))
    heard: list[dict[str, Any]] = []

    def kernel(content: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        heard.append(content)
        reply = talk.reply(content)
        assert reply is not None
        return reply[0], [base64.b64encode(data).decode() for data in reply[1]]

    troubles: list[str] = []
    context = browser.new_context(viewport={"width": 1000, "height": 900}, locale="en-US")
    page = context.new_page()
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("console", lambda message: troubles.append(message.text))
    page.on(
        "request", lambda request: troubles.append(request.url) if request.url.startswith("http") else None
    )
    page.expose_function("kernel", kernel)
    page.evaluate(FAKE, [bundle.read("widget.js"), document()])
    page.wait_for_function("() => document.querySelectorAll('iframe').length === 2")
    frames = page.frames[1:]
    assert len(frames) == 2
    for frame in frames:
        frame.wait_for_function(READY, timeout=60_000)
    one, two = frames
    one.evaluate("() => kizukiPage.store.set({ layer: 5, head: 3, query: 30, key: 4 })")
    one.wait_for_timeout(50)
    one.wait_for_function(READY, timeout=60_000)
    row = made[5][0, 3, 30]
    shown = table(one)
    assert shown
    for token, weight in shown:
        assert math.isclose(weight, row[token], rel_tol=6e-4)
    own = two.evaluate("() => kizukiPage.store.state.layer")
    assert own == talk.answers.meta["start"]["layer"]  # each cell has its own selection
    assert len({message["view"] for message in heard}) == 2
    outside = one.evaluate(
        "() => { try { return String(parent.document); } catch (error) { return error.name; } }"
    )
    assert outside == "SecurityError"
    page.evaluate(
        "() => { traits.height = 500; for (const [name, call] of listeners) if (name[0] === 'c') call(); }"
    )
    assert page.locator("iframe").first.evaluate("f => f.clientHeight") == 500
    page.evaluate("() => { for (const call of leave) call(); }")
    assert page.locator("iframe").count() == 0
    assert page.evaluate("() => listeners.length") == 0
    context.close()
    assert troubles == []
