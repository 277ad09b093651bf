"""`kizuki bench` and `kizuki warmup`: does a wrong answer stay untimed, is everybody given the same problem, does a
bar mean what it says, and does each thing a careless user gives get one clear line?"""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from kizuki import cli
from kizuki.bench import cells, fresh, growth, job, measure, peak, plot, providers, rows, truth
from kizuki.bench.cells import CELLS, Bar, Cell
from kizuki.bench.providers import CannotDo, Way
from kizuki.cpu import launch, warmup
from kizuki.cpu.target import emits
from kizuki.errors import OptionError

ROOT = Path(__file__).parents[1]
TINY = Cell("forward/f32/tiny", "forward", "f32", 2, 4, 4, 37, 37, 16, bars=(Bar("peers", 1.0),))
SMALL = {
    "forward": TINY,
    "causal": replace(TINY, causal=True),
    "bf16": replace(TINY, dtype="bf16"),
    "f16": replace(TINY, dtype="f16"),
    "f64": replace(TINY, dtype="f64"),
    "decode": replace(TINY, kind="decode", queries=1, kv_heads=2),
    "backward": replace(TINY, kind="backward"),
    "backward causal": replace(TINY, kind="backward", causal=True),
    "window": replace(TINY, kind="share", rule="window", queries=600, keys=600),
    "documents": replace(TINY, kind="share", rule="documents", queries=2048, keys=2048, heads=1, kv_heads=1),
    "lengths": replace(TINY, kind="share", rule="lengths"),
    "dense": replace(TINY, kind="share", rule="dense"),
    "bias": replace(TINY, kind="share", rule="bias"),
}
CANNOT = {  # what a peer has to refuse, and in which words
    ("onnxruntime", "bf16"): "bfloat16",
    ("onnxruntime", "backward"): "gradients",
    ("onnxruntime", "backward causal"): "gradients",
    ("openvino", "backward"): "gradients",
    ("openvino", "backward causal"): "gradients",
    ("jax", "f16"): "float16",
}


class Fake:
    """A provider whose answer is right, wrong or an error, and which counts its calls."""

    def __init__(self, name: str, spoil: float = 0.0, fault: Exception | None = None) -> None:
        self.name, self.spoil, self.fault, self.calls = name, spoil, fault, 0

    def version(self) -> str | None:
        return "1"

    def ways(self, cell, data, threads):
        way = providers.TorchEager().ways(cell, data, threads)[0]

        def call() -> None:
            self.calls += 1
            if self.fault is not None:
                raise self.fault
            way.call()

        return [Way(call, lambda: tuple(t + self.spoil for t in way.results()))]


def test_every_row_of_the_bar_table_is_a_cell_with_its_bar():
    counts: dict[str, int] = {}
    for name, cell in CELLS.items():
        assert cell.bars, f"{name} has no bar"
        assert name == cell.name
        counts[cell.kind] = counts.get(cell.kind, 0) + 1
    assert counts == {
        "forward": 24, "short": 6, "decode": 6, "backward": 12, "share": 5, "call": 1, "fresh": 3
    }  # fmt: skip
    assert CELLS["forward/f32/1x8x3840x128"].bars == (Bar("peers", 1.08), Bar("peak", 0.82))
    assert CELLS["forward/bf16/1x12x768x64/causal"].bars == (Bar("peers", 2.0),)


def test_names_beginnings_and_patterns_choose_cells():
    assert [cell.name for cell in cells.choose(["forward/f64/1x12x768x64"])] == ["forward/f64/1x12x768x64"]
    assert len(cells.choose(["forward/f64/"])) == 6
    assert {cell.causal for cell in cells.choose(["*/causal"])} == {True}
    assert len(cells.choose([])) == len(CELLS)
    with pytest.raises(OptionError, match="no cell 'forwards'"):
        cells.choose(["forwards"])


@pytest.mark.parametrize("name", ["forward", "causal", "window", "documents", "lengths"])
def test_operations_count_the_visible_pairs(name):
    cell = SMALL[name]
    rows = torch.arange(cell.queries)
    seen = 0
    for batch in range(cell.batch):
        mask = cell.visible(batch, rows)
        seen += cell.heads * (cell.queries * cell.keys if mask is None else int(mask.sum()))
    assert cell.pairs == seen
    assert cell.operations == 4 * seen * cell.head_dim
    assert math.isclose(cell.share, seen / (cell.batch * cell.heads * cell.queries * cell.keys))


INSTALLED = {name: provider.version() is not None for name, provider in providers.all_providers().items()}
CASES = [(name, case) for name, there in INSTALLED.items() for case in SMALL if there]


@pytest.mark.skipif(not all(INSTALLED.values()), reason="needs every peer (pip install kizuki[bench])")
def test_every_peer_is_installed_and_tested_here():
    assert {name for name, _ in CASES} == set(INSTALLED)


@pytest.mark.parametrize(("name", "case"), CASES)
def test_a_provider_computes_the_cell_or_says_why_not(name, case):
    provider, cell = providers.all_providers()[name], SMALL[case]
    data = providers.make_data(cell)
    if name == "jax":
        from kizuki.bench import peers

        threads = peers._pool or peers._cores()
    else:
        threads = 2
    if (name, case) in CANNOT:
        with pytest.raises(CannotDo, match=CANNOT[name, case]):
            provider.ways(cell, data, threads)
        return
    exact = truth.Truth(cell, data)
    ways = provider.ways(cell, data, threads)
    assert ways
    for way in ways:
        way.call()
        report = exact.check(name, way.results(), 1.0 if name == "kizuki" else truth.PEER_SLACK)
        if case == "f64" and name in (
            "openvino",
            "jax",
        ):  # they compute scores in float32, and the check has to notice
            assert not report.ok
        else:
            assert report.ok, str(report)


@pytest.mark.parametrize("name", ["forward", "bf16", "causal", "backward", "decode", "lengths"])
def test_the_check_notices_what_is_wrong(name):
    cell = SMALL[name]
    data = providers.make_data(cell)
    way = providers.Kizuki().ways(cell, data, 2)[0]
    way.call()
    right = way.results()
    exact = truth.Truth(cell, data)
    assert exact.check("x", right).ok
    for index in range(len(right)):
        spoiled = [t.clone() for t in right]
        spoiled[index][-1, -1] *= 1.2
        assert not exact.check("x", tuple(spoiled), truth.PEER_SLACK).ok
    assert not exact.check("x", (right[0].to(torch.float16), *right[1:]), truth.PEER_SLACK).ok
    if name != "decode":
        other = providers.Kizuki().ways(replace(cell, causal=not cell.causal, rule=None), data, 2)[0]
        other.call()
        assert not exact.check("x", other.results(), truth.PEER_SLACK).ok, "another mask was not noticed"


def test_a_wrong_provider_is_reported_and_never_timed():
    right, wrong = Fake("torch-right"), Fake("torch-wrong", spoil=0.01)
    broken = Fake("broken", fault=RuntimeError("no such kernel\nand a long story"))
    effort = measure.Effort(seconds=0.02, rounds=3)
    found = measure.measure(
        TINY, [providers.Kizuki(), right, wrong, broken], peak.Peaks(2), effort, threads=2
    )
    by = {row.provider: row for row in found}
    assert [row.status for row in found] == ["ok", "ok", "wrong", "failed"]
    assert wrong.calls == 1
    assert broken.calls == 1
    assert right.calls > 3
    assert by["torch-wrong"].median is None
    assert by["torch-wrong"].error == pytest.approx(0.01, rel=0.01)
    assert by["broken"].note == "RuntimeError: no such kernel"
    ours = by["kizuki"]
    assert ours.median is not None
    assert ours.low <= ours.median <= ours.high
    assert ours.reached == [(Bar("peers", 1.0), by["torch-right"].median / ours.median)]
    assert 0 < ours.of_peak < 1.2


def test_groups_take_turns_with_a_warm_up_before_each():
    order: list[str] = []
    calls = {name: (lambda name=name: (order.append(name), time.sleep(0.001))) for name in "ab"}
    times = measure.take_turns(calls, measure.Effort(seconds=0.006, rounds=3))
    body = "".join(order[2:])  # the first two calls only size the groups
    assert re.fullmatch(r"(a{2,}b{2,}){3}", body)
    assert {name: len(taken) for name, taken in times.items()} == {n: body.count(n) - 3 for n in "ab"}
    assert min(times["a"]) >= 0.001


def test_bars_are_compared_with_what_they_name():
    share = replace(
        SMALL["lengths"], bars=(Bar("share", 1.3), Bar("peers", 1.0), Bar("torch", 1.0), Bar("seconds", 1.0))
    )
    found = [rows.Row(share, name) for name in ("kizuki", rows.WHOLE, "torch-sdpa", "jax", "openvino")]
    for row, median in zip(found, (2.0, 4.0, 6.0, 3.0, None), strict=True):
        row.median = median
    measure.compare(found)
    got = dict(found[0].reached)
    assert got[Bar("share", 1.3)] == pytest.approx(2.0 / (share.share * 4.0))
    assert got[Bar("peers", 1.0)] == 1.5
    assert got[Bar("torch", 1.0)] == 3.0
    assert not Bar("seconds", 1.0).met(got[Bar("seconds", 1.0)])
    assert Bar("share", 1.3).met(1.3)
    assert not Bar("peers", 1.08).met(1.07)


def test_median_and_spread():
    row = rows.Row(TINY, "kizuki")
    measure.fill(row, [float(n) for n in reversed(range(11))])
    assert (row.low, row.median, row.high, row.calls) == (1.0, 5.0, 9.0, 11)


def test_a_line_says_everything_needed_to_repeat_it():
    row = rows.Row(CELLS["decode/f32/8x9on3x2048x64"], "kizuki", median=1e-3, gbs=10.0, peak=20.0)
    row.reached = [(row.cell.bars[1], 0.5)]
    facts = job.about(2, list(providers.all_providers().values()))
    line = json.loads(row.line(facts))
    assert line["command"] == "kizuki bench decode/f32/8x9on3x2048x64"
    assert line["of_peak"] == 0.5
    assert line["bars"] == [{"quantity": "read", "at_least": 0.8, "got": 0.5, "met": False}]
    assert line["problem_kv_heads"] == 3
    assert line["threads"] == 2
    assert line["versions"]["torch-sdpa"] == torch.__version__


def test_the_peaks_are_above_what_a_product_reaches():
    torch.set_num_threads(2)
    assert peak.multiply_adds("f32", 2).value > 0.5 * peak.products(torch.float32)
    assert peak.multiply_adds("f32", 2).value > 1.2 * peak.multiply_adds("f64", 2).value


@pytest.mark.parametrize(
    ("kind", "instruction"), [("f32", "vfmadd"), ("f64", "vfmadd"), ("bf16", "vdpbf16ps")]
)
def test_the_chains_are_the_instructions_they_are_named_for(kind, instruction):
    import llvmlite.binding as llvm
    from llvmlite import ir

    if kind == "bf16" and not emits("avx512bf16"):
        pytest.skip(f"LLVM {llvm.llvm_version_info[0]} has no such instruction on bfloat16 operands")
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = ir.Module()
    module.triple = "x86_64-unknown-linux-gnu"
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 2), "spin")
    builder = ir.IRBuilder(function.append_basic_block())
    operations = peak.emit(builder, kind, 16, *function.args)
    builder.ret_void()
    machine = llvm.Target.from_triple(module.triple).create_target_machine(cpu="cooperlake", opt=3)
    text = machine.emit_assembly(llvm.parse_assembly(str(module)))
    used = re.findall(rf"{instruction}\w*\s.*%zmm", text)
    assert len(used) == peak.CHAINS
    assert operations == {"f32": 384, "f64": 192, "bf16": 768}[kind]


def test_a_fresh_process_is_measured():
    row = fresh.measure(CELLS["fresh/import"], measure.Effort(rounds=1), threads=2)[0]
    assert row.calls == 1
    assert 0 < row.median < 30
    assert row.reached == [(Bar("seconds", 0.3), row.median)]


def test_growth_measures_a_point_and_stops_a_process_over_its_limits():
    point = growth.run("torch-eager", 1024, threads=2)
    assert point.failed == ""
    assert point.seconds > 0
    weights = 1024 * 1024 * 4
    assert weights < point.extra_bytes < 30 * weights
    assert growth.run("torch-eager", 1024, 2, most=1_000_000).failed == "more than 0 GB"
    assert growth.run("torch-eager", 16384, 2, seconds=0.0).failed == "more than 0 s a call"


def test_growth_ends_a_curve_where_a_provider_fails(monkeypatch):
    def run(name, tokens, threads):
        return growth.Point(name, tokens, 1.0, tokens, failed="" if tokens < 1024 else "too much")

    monkeypatch.setattr(growth, "run", run)
    tried = list(growth.measure([Fake("a"), Fake("b")], 2, (256, 512, 1024, 2048)))
    assert [(p.provider, p.tokens) for p in tried] == [(n, t) for n in "ab" for t in (256, 512, 1024)]
    assert growth.slope([growth.Point("kizuki", n, 1.0, 3 * n) for n in (256, 4096)]) == pytest.approx(1.0)


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="needs matplotlib (pip install kizuki[bench])")
def test_plots_are_drawn(tmp_path):
    found = [rows.Row(TINY, "kizuki", of_ours=1.0), rows.Row(TINY, "jax", of_ours=2.0)]
    plot.grid(found, tmp_path / "grid.svg", "a machine")
    text = (tmp_path / "grid.svg").read_text(encoding="utf-8")
    assert "forward/f32/tiny" in text
    assert "jax" in text
    points = [growth.Point("kizuki", n, n / 1e6, n * 100) for n in (256, 512)]
    points += [growth.Point("jax", 256, 1e-3, 10**6), growth.Point("jax", 512, failed="more than 8 GB")]
    plot.growth(points, tmp_path / "growth.svg", "a machine")
    assert "jax (at 512: more than 8 GB)" in (tmp_path / "growth.svg").read_text(encoding="utf-8")
    with pytest.raises(OptionError, match="no folder"):
        plot.check(tmp_path / "nosuch" / "x.png")
    with pytest.raises(OptionError, match="has to end in"):
        plot.check(tmp_path / "x.txt")


def command(capsys, *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stopped:
        cli.main(args)
    return (int(stopped.value.code or 0), *capsys.readouterr())


@pytest.fixture(autouse=True)
def hook(monkeypatch):
    import sys

    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # main sets it; put it back


def test_the_list(capsys):
    code, out, _ = command(capsys, "bench", "--list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == [*CELLS, "growth"]


def test_a_cell_from_the_command_line(capsys, tmp_path):
    lines = tmp_path / "lines.jsonl"
    before = torch.get_num_threads()
    code, out, _ = command(
        capsys,
        *("bench", "call", "--quick", "--only", "kizuki,torch-sdpa", "--threads", "1", "--out", str(lines)),
    )
    assert code == 0
    assert "call/f32/1x1x1x8" in out
    assert "of 1 bars met" in out
    found = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
    assert [line["provider"] for line in found] == ["kizuki", "torch-sdpa"]
    assert all(line["threads"] == 1 and line["quick"] and line["median_s"] > 0 for line in found)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["nosuch"], "no cell 'nosuch'"),
        (["growth", "call"], "growth is a run of its own"),
        (["call", "--only", "tensorflow"], "--only has 'tensorflow'; choose from kizuki, torch-sdpa"),
        (["call", "--only", ","], "--only names nobody"),
        (["call", "--out", "nosuch/lines.jsonl"], "--out nosuch/lines.jsonl: cannot be written"),
        (["call", "--plot", "page.html"], "has to end in one of .png, .svg, .pdf"),
        (["call", "--threads", "0"], "--threads"),
        (["call", "--seconds", "nan"], "--seconds"),
    ],
)
def test_one_line_for_what_cannot_be_used(capsys, monkeypatch, tmp_path, args, said):
    monkeypatch.chdir(tmp_path)
    code, _, err = command(capsys, "bench", *args)
    assert code == 2
    assert said in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_answer_of_ours_is_exit_code_1(capsys, monkeypatch):
    monkeypatch.setattr(providers, "choose", lambda listed: [Fake("kizuki", spoil=1.0)])
    code, out, err = command(capsys, "bench", "call", "--quick")
    assert code == 1
    assert "wrong: kizuki output: error 1 against float64" in out
    assert err == "kizuki itself was wrong or failed in a cell above\n"


def test_warmup_names_each_kernel_and_keeps_it(capsys, monkeypatch):
    monkeypatch.setattr(launch, "KERNELS", ("pack",))
    code, out, err = command(capsys, "warmup")
    assert code == 0
    assert re.search(rf"^pack-{launch.target().name}\s+(loaded|compiled)\s+[\d.]+ s$", err, flags=re.M)
    assert out.startswith(f"{warmup.count()} kernels in ")
    assert [kernel.loaded for kernel in warmup.warm()] == [True] * warmup.count()


def test_warmup_says_when_the_cache_cannot_be_written(capsys, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KIZUKI_CACHE", str(tmp_path / "file"))
    code, out, err = command(capsys, "warmup")
    assert code == 1
    assert out == ""
    assert err.count("\n") == 1
    assert "cannot be written (Not a directory); set KIZUKI_CACHE" in err


@pytest.mark.pinned
def test_what_bench_installs_is_pinned():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {line.partition("==")[0] for line in lines}
    listed = re.search(r"^bench = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.M)
    names = re.findall(r'"([\w-]+)"', listed[1])
    assert {"onnxruntime", "openvino", "jax", "matplotlib"} <= set(names)
    assert set(names) <= pins
    for line in lines:
        name, _, version = line.partition("==")
        if name in names and find_spec(name):
            assert metadata.version(name) == version
