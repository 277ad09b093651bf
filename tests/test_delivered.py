"""Is what a browser is sent the program that people read in static/?"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import zlib
from importlib.resources import files
from pathlib import Path

import pytest

from kizuki.explorer import bundle
from kizuki.explorer.squeeze import squeeze

NODE = pytest.mark.skipif(
    shutil.which("node") is None and not os.environ.get("CI"), reason="node is not installed"
)
MODULES = sorted(
    file.name for file in files("kizuki.explorer").joinpath("static").iterdir() if file.name.endswith(".js")
)
JS = Path(__file__).parent / "js"


def node(*arguments: str, code: str | None = None) -> str:
    done = subprocess.run(["node", *arguments], input=code, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


@NODE
def test_every_module_parses_and_so_does_the_script_made_of_them(tmp_path: Path) -> None:
    code = {name: bundle.read(name) for name in MODULES}
    (tmp_path / "code.json").write_text(json.dumps(code), encoding="utf-8")
    check = """
        import { readFileSync } from "node:fs";
        import { SourceTextModule } from "node:vm";
        for (const [name, text] of Object.entries(JSON.parse(readFileSync(process.argv[1])))) {
          try { new SourceTextModule(text); } catch (error) { console.log(name, error.message); }
        }"""
    quiet = ("--experimental-vm-modules", "--no-warnings", "--input-type=module")
    assert node(*quiet, "--eval", check, str(tmp_path / "code.json")) == ""
    for carrier in bundle.LEFT_OUT:
        (tmp_path / "page.js").write_text(bundle.script("main.js", carrier), encoding="utf-8")
        node("--check", str(tmp_path / "page.js"))  # as the classic script that it is


@NODE
def test_the_front_ends_own_tests_pass_on_what_is_delivered(tmp_path: Path) -> None:
    parts = [name for name in MODULES if name not in ("main.js", "widget.js")]  # what starts when it is read
    exports = {name: bundle.EXPORT.findall(bundle.read(name)) for name in parts}
    every = ", ".join(name for names in exports.values() for name in names)
    static = tmp_path / "src" / "kizuki" / "explorer" / "static"
    static.mkdir(parents=True)
    code = squeeze(
        f"export const delivered = await (async () => {{\n{bundle.joined(*parts)}\nreturn {{ {every} }};\n}})();"
    )
    # The words are unpacked where there is a document, as on the page.
    start = "globalThis.document = {};\n"
    bare = re.sub(r"export let \w+=", "export const delivered=", start + code, count=1)
    (static / "delivered.js").write_text(bare, encoding="utf-8")
    (static / "package.json").write_text(bundle.read("package.json"), encoding="utf-8")
    for name, names in exports.items():
        shim = f'import {{ delivered }} from "./delivered.js";\nexport const {{ {", ".join(names)} }} = delivered;\n'
        (static / name).write_text(shim, encoding="utf-8")
    shutil.copytree(JS, tmp_path / "tests" / "js")
    wanted = [str(path) for path in sorted((tmp_path / "tests" / "js").glob("*.mjs"))]
    assert wanted
    node("--test", *wanted)


@NODE
def test_the_words_travel_whole() -> None:
    found = re.search(r'inflated\("([^"]+)"\)', bundle.joined("words.js"))
    assert found
    sent = json.loads(zlib.decompress(base64.b64decode(found[1])))
    read = json.loads(
        node("--input-type=module", code=bundle.read("words.js") + "\nconsole.log(JSON.stringify(WORDS));")
    )
    assert sent == read
    assert list(sent) == ["en", "ja"]
