"""What the examples in docstrings share: a folder of their own, for those that write a file."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def example_s_own_folder(request: pytest.FixtureRequest) -> None:
    if isinstance(request.node, pytest.DoctestItem):
        folder = request.getfixturevalue("tmp_path")
        request.getfixturevalue("monkeypatch").chdir(folder)


@pytest.hookimpl(
    tryfirst=True
)  # before the hook of the tests, which says what to do where a model is missing
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.DoctestItem):
            sources = "".join(example.source for example in item.dtest.examples)
            if "smollm2" in sources or "minilm" in sources:
                item.add_marker("model")
