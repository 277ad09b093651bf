"""Do the page's interventions say what the live model does, one at a time, and leave the model as it was?"""

from __future__ import annotations

import http.client
import re
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from pages import axe, make_run, matrix, settle, text_of
from served import asked, unpack
from tiny import tiny

from kizuki.explorer import causing
from kizuki.explorer.answers import Answers, QuestionError
from kizuki.explorer.causing import BusyError, Causes
from kizuki.explorer.heads import Stale
from kizuki.explorer.server import HOST, Server
from kizuki.explorer.widget import Conversation
from kizuki.models import Run, Source, Tokens, run
from kizuki.models.causes import AblateHead

IDS = [3, 14, 15, 92, 65, 35, 8, 9, 79, 32, 38, 46]
WORDS = [f"w{i} " for i in range(len(IDS))]
SELECTED = {"layer": 1, "head": 2, "query": 7, "key": 4, "position": 9, "weight": 250, "controls": 3}


def tokens() -> Tokens:
    ends = np.cumsum([len(word) for word in WORDS]).tolist()
    return Tokens(
        "".join(WORDS), IDS, list(zip([0, *ends[:-1]], ends, strict=True)), WORDS, [False] * len(IDS)
    )


def live(family: str = "llama") -> Run:
    """A run of a tiny random model that is still here. It has no tokenizer: its tokens are called by their numbers."""
    kind: Any = "encoder" if family == "bert" else "decoder"
    return run(Source("tiny", tiny(family), None, kind, 64), tokens(), k=0)


@pytest.fixture(scope="module")
def model() -> Run:
    return live()


def logits(made: Run, change: Any = None) -> torch.Tensor:
    """The model's log-probabilities at the position, with `change` made to the input of W_O of the layer."""
    assert made.source
    network = made.source.model
    hook = network.model.layers[SELECTED["layer"]].self_attn.o_proj.register_forward_pre_hook(
        lambda module, args: None if change is None else (change(args[0].clone()),)
    )
    with torch.no_grad():
        out = network(input_ids=torch.tensor([IDS]), use_cache=False).logits[0, SELECTED["position"]]
    hook.remove()
    return out.double().log_softmax(-1)


def without_head(head: int) -> Any:
    def change(z: torch.Tensor) -> torch.Tensor:  # [1, tokens, heads · head_dim]
        z.view(1, len(IDS), 4, -1)[:, :, head] = 0
        return z

    return change


def test_a_head_taken_away_is_measured_as_a_hook_on_w_o_measures_it(model: Run) -> None:
    found = asked(Answers(model), "cause", kind="zero", **SELECTED)
    before = logits(model)

    def kl(head: int) -> float:
        return float((before.exp() * (before - logits(model, without_head(head)))).sum())

    after = logits(model, without_head(2))
    assert found["unit"] == "kl"
    assert np.isclose(found["size"], kl(2), rtol=1e-4, atol=1e-9)
    assert found["controls"] == [0, 1, 3]
    assert np.allclose(found["sizes"], [kl(head) for head in (0, 1, 3)], rtol=1e-4, atol=1e-9)
    assert np.isclose(found["mean"], np.mean(found["sizes"]))
    assert np.isclose(found["sd"], np.std(found["sizes"], ddof=1))
    assert found["above"] == int((found["sizes"] >= found["size"]).sum())
    for name, log in (("before", before), ("after", after)):
        assert found[f"{name}_names"] == [str(i) for i in log.topk(5).indices.tolist()]
        assert np.allclose(found[name], log.topk(5).values.exp(), rtol=1e-5)


@pytest.mark.parametrize("kind", ["mean", "key", "key_everywhere", "row"])
def test_every_intervention_moves_the_answer_and_leaves_the_model_as_it_was(model: Run, kind: str) -> None:
    before = logits(model)
    found = asked(Answers(model), "cause", kind=kind, **SELECTED)
    assert found["size"] > 0
    assert len(found["controls"]) == 3
    assert torch.equal(logits(model), before)


def test_a_weight_that_is_the_models_own_changes_nothing(model: Run) -> None:
    """The other end of the row's scale: 1 on the only key that query 0 sees."""
    found = asked(
        Answers(model),
        "cause",
        kind="row",
        **{**SELECTED, "query": 0, "key": 0, "weight": 1000, "controls": 0},
    )
    assert found["size"] < 1e-9
    assert found["controls"] is None


def test_an_encoder_says_how_far_its_state_moved() -> None:
    found = asked(Answers(live("bert")), "cause", kind="zero", **SELECTED)
    assert found["unit"] == "moved"
    assert found["size"] == found["moved"] > 0
    assert len(found["before"]) == 0


BAD = [
    ({"kind": "erase"}, "kind: is 'erase' but must be one of zero, mean, key, key_everywhere, row"),
    ({"kind": "zero", "head": 4}, "head: is 4 but must be in 0 … 3"),
    ({"kind": "zero", "controls": 11}, "controls: is 11 but must be in 0 … 10"),
    ({"kind": "row", "weight": 1001}, "weight: is 1001 but must be in 0 … 1000"),
    ({"kind": "row", "key": 9}, "intervene: key 9 is hidden from query 7 by the model's mask; leave it out"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_what_cannot_be_done_is_one_line(model: Run, change: dict[str, Any], message: str) -> None:
    with pytest.raises(QuestionError) as caught:
        asked(Answers(model), "cause", **{**SELECTED, **change})
    assert str(caught.value) == message


def test_a_recording_without_its_model_says_how_to_get_it() -> None:
    answers = Answers(Run(tokens(), live().recording, None, None, {}))
    assert answers.meta["live"] is False
    with pytest.raises(
        QuestionError, match="the model of this recording is not here; serve a text with its model"
    ):
        asked(answers, "cause", kind="zero", **SELECTED)


def test_a_notebook_asks_the_same(model: Run) -> None:
    talk = Conversation(Answers(model))
    content, (data,) = talk.reply(
        {"view": "v", "id": 1, "what": "cause", "parameters": {"kind": "zero", **SELECTED}}
    ) or ({}, [b""])
    assert content == {"view": "v", "id": 1}
    assert unpack(data)["controls"] == [0, 1, 3]


# -- one at a time, and whoever is gone ----------------------------------------------------------------


def test_one_is_measured_at_a_time_one_waits_and_a_third_is_refused(
    model: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert model.source
    causes = Causes(model.source, model.tokens)
    inside, most, first, go = [0], [0], threading.Event(), threading.Event()

    def slow(*given: Any, **options: Any) -> str:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        first.set()
        assert go.wait(20)
        inside[0] -= 1
        return "done"

    monkeypatch.setattr("kizuki.models.causes.cause", slow)
    done: list[Any] = []
    edit = AblateHead(1, 2)
    both = [
        threading.Thread(target=lambda: done.append(causes.effect(edit, 0, 0, lambda: False)))
        for _ in range(2)
    ]
    both[0].start()
    assert first.wait(20)
    both[1].start()
    while causes._places._value:  # type: ignore[attr-defined] # until the second has its place
        threading.Event().wait(0.005)
    with pytest.raises(BusyError, match="two interventions are under way"):
        causes.effect(edit, 0, 0, lambda: False)
    go.set()
    for thread in both:
        thread.join(20)
    assert (done, most) == (["done", "done"], [1])


def test_it_stops_between_two_passes_for_whoever_is_gone(model: Run) -> None:
    assert model.source
    causes, looks = Causes(model.source, model.tokens), iter([False, False, False, True])
    before = logits(model)
    with pytest.raises(Stale):
        causes.effect(AblateHead(1, 2), 0, 3, lambda: next(looks))
    assert next(looks, "asked no more") == "asked no more"
    assert torch.equal(logits(model), before)
    assert causes.effect(AblateHead(1, 2), 0, 0, lambda: False).moved > 0  # nothing is held


@pytest.fixture(scope="module")
def server(model: Run) -> Iterator[Server]:
    with Server(Answers(model)).running() as running:
        yield running


def get(server: Server, question: str, **headers: str) -> tuple[int, bytes]:
    line = http.client.HTTPConnection(HOST, server.port, timeout=60)
    try:
        line.request("GET", f"/{server.token}/data/cause?{question}", headers=headers)
        answer = line.getresponse()
        return answer.status, answer.read()
    finally:
        line.close()


def query(**change: Any) -> str:
    return "&".join(f"{name}={value}" for name, value in {"kind": "zero", **SELECTED, **change}.items())


def test_the_route_answers_its_own_page_and_nobody_else(server: Server) -> None:
    status, body = get(server, query())
    assert status == 200
    assert unpack(body)["controls"] == [0, 1, 3]
    for status, headers in (
        (421, {"Host": "example.org"}),
        (403, {"Origin": "null"}),
        (403, {"Sec-Fetch-Site": "cross-site"}),
    ):
        assert get(server, query(), **headers)[0] == status
    status, body = get(server, query(kind="%3Cb%3E"))
    assert status == 400
    assert re.fullmatch(r"kind: is '<b>' but must be one of [a-z_, ]+ \([0-9a-f]{8}\)", body.decode())
    assert "Traceback" not in get(server, query(key="9", kind="row"))[1].decode()


def test_a_client_that_vanishes_does_no_harm(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, stopped = threading.Event(), threading.Event()

    def endless(*given: Any, progress: Any, **options: Any) -> None:
        begun.set()
        try:
            for _ in range(3000):
                progress("interventions", 0, 1)
                threading.Event().wait(0.01)
        except Stale:
            stopped.set()
            raise

    with monkeypatch.context() as patch:
        patch.setattr("kizuki.models.causes.cause", endless)
        line = socket.create_connection((HOST, server.port), timeout=60)
        line.sendall(
            f"GET /{server.token}/data/cause?{query()} HTTP/1.1\r\nHost: {HOST}:{server.port}\r\n\r\n".encode()
        )
        assert begun.wait(20)
        line.close()
        assert stopped.wait(20)
    assert get(server, query())[0] == 200


# -- the panel ------------------------------------------------------------------------------------------


@pytest.mark.browser
@pytest.mark.parametrize(
    ("locale", "width", "heading"),
    [("en-US", 1280, "Cause, not only weight"), ("ja-JP", 360, "重みだけでなく原因を調べる")],
)
def test_the_panel_measures_by_keyboard_and_says_what_python_says(
    server: Server, browser: Any, locale: str, width: int, heading: str
) -> None:
    context = browser.new_context(viewport={"width": width, "height": 900}, locale=locale)
    page = context.new_page()
    troubles: list[str] = []
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.goto(f"{server.address}#l=1&h=2&q=9&k=4")
    settle(page)
    assert text_of(page, "#cause-heading") == heading
    page.keyboard.press("7")
    assert page.evaluate("() => document.activeElement.id") == "cause-kind"
    page.select_option("#cause-controls", "4")
    page.focus("#cause-run")
    page.keyboard.press("Enter")
    page.wait_for_function("() => kizukiPage.cause.found !== null && !kizukiPage.cause.asking")
    wanted = asked(server.answers, "cause", kind="zero", **{**SELECTED, "controls": 4})
    cells = page.evaluate(
        "() => [...document.querySelectorAll('#cause-found table')]"
        ".map(t => [...t.tBodies[0].rows].map(r => [...r.cells].map(c => c.textContent)))"
    )
    sizes, tops = cells
    number = [float(row[1].split(" ")[0].replace("−", "-")) for row in sizes]
    others = sorted(wanted["sizes"], reverse=True)
    assert np.allclose(number, [wanted["size"], wanted["mean"], *others], rtol=1e-3)
    assert [row[0] for row in tops] == wanted["before_names"]
    assert [row[3] for row in tops] == wanted["after_names"]
    widths = page.evaluate(
        "() => [...document.querySelector('#cause-found table').tBodies[0].rows]"
        ".map(r => parseFloat(r.querySelector('.bar').style.width))"
    )
    assert np.allclose(
        widths, 100 * np.array(number) / max(number), rtol=2e-3, atol=1e-3
    )  # bars on one scale
    saved = page.evaluate("() => JSON.parse(JSON.stringify(kizukiPage.files.numbers('cause')))")
    assert np.allclose([row[2] for row in saved["rows"][:4]], [wanted["size"], *wanted["sizes"]], rtol=1e-12)
    assert [row[1] for row in saved["rows"][4:9]] == wanted["before_names"]
    page.evaluate("() => kizukiPage.store.set({ head: 0 })")
    settle(page)
    assert page.locator("#cause-found .warn").count() == 1  # it says that it is of another selection
    assert axe(page) == []
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    assert troubles == []
    context.close()


@pytest.mark.browser
def test_without_a_model_the_panel_says_why_in_one_line(show: Any, browser: Any, tmp_path: Any) -> None:
    from kizuki.explorer import write_page

    page = show(write_page(tmp_path / "page.html", make_run({0: matrix()})))
    assert "There is no model here, only what was recorded" in text_of(page, "#cause-none")
    assert page.locator("#cause").is_hidden()
    with Server(Answers(make_run({0: matrix()}))).running() as running:
        context = browser.new_context()
        served = context.new_page()
        served.goto(running.address)
        settle(served)
        assert "kizuki look TEXT --model M --serve" in text_of(served, "#cause-none")
        context.close()


def test_the_bounds_of_the_work_are_those_that_the_page_offers() -> None:
    from kizuki.explorer import bundle

    offered = re.search(r'id="cause-controls">(.*?)</select>', bundle.read("page.html"))
    assert offered
    assert max(map(int, re.findall(r"<option>(\d+)", offered[1]))) == causing.CONTROLS
    kinds = re.search(r"const KINDS = \[(.*?)\]", bundle.read("cause.js"))
    assert kinds
    assert tuple(re.findall(r'"(\w+)"', kinds[1])) == causing.KINDS


def test_a_notebook_with_the_model_measures_and_refuses_another_model(model: Run) -> None:
    from dataclasses import replace

    from kizuki.models import RecordError

    assert model.source
    shown = model.recording.show(source=model.source)
    try:
        assert asked(shown.conversation.answers, "cause", kind="zero", **SELECTED)["size"] > 0
    finally:
        shown.close()
    with pytest.raises(RecordError, match=r"recording\.show: source is other but tiny was recorded"):
        model.recording.show(source=replace(model.source, name="other"))
