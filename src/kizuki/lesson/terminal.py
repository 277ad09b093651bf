"""The lesson in a terminal: the eight steps one below the other, and any number opened."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from . import exact, formula, spread
from .formula import Array
from .material import Material
from .opened import Book, Opened
from .plane import plane
from .tell import Teller, percent, shown, spoken
from .wrap import wrap

BLOCKS = " ▏▎▍▌▋▊▉█"
FEW = 12  # rows of a table at most; a longer sentence shows its largest, and says how much that is
TERMS = 5


class Terminal:
    """Writes a lesson to a console; 80 columns are enough, and more are used."""

    def __init__(self, lesson: Material, language: str, console: Console) -> None:
        self.lesson, self.console = lesson, console
        self.tell = Teller(lesson, language)
        self.say = self.tell.say
        self.book = Book(lesson)
        self.width = min(console.width, 120)
        self.i = lesson.word
        self.weights = lesson.weights()
        self.j = int(self.weights[self.i].argmax())

    def lesson_in_full(self) -> None:
        """All eight steps."""
        self._title()
        for number, step in enumerate((self._x, self._qkv, self._scores, self._scale), 1):
            self._heading(number)
            step()
            self._examples(number)
        for number, step in enumerate((self._mask, self._softmax, self._mix, self._heads), 5):
            self._heading(number)
            step()
            self._examples(number)
        self._end()

    def number(self, name: str) -> None:
        """One number, opened: every product of it."""
        self._opened(self.book.open(name), None)

    # The parts.

    def _title(self) -> None:
        self.console.print()
        self._text(self.say("title"), "bold")
        self._text(self.say("subtitle"))
        self.console.print()
        line = Text("  ")
        for i, label in enumerate(self.lesson.labels):
            style = "reverse bold" if i == self.i else "bold" if i == self.j else ""
            line.append(spoken(label), style).append(f"{i} ", "dim")
        self._print(line)
        self._text(self.say("caution"), "yellow")

    def _heading(self, number: int) -> None:
        self.console.print()
        title = f"[bold]{number}  {escape(self.say(f'step{number}_title'))}[/]"
        self._print(Rule(title, align="left", style="cyan"))
        self._text(self.say(f"step{number}_text"))

    def _x(self) -> None:
        around = self.lesson.projection
        if around is None:
            self._text(self.say(self.lesson.why), "yellow")
        columns = 0 if around is None else self._fit(24)
        made = self._table("number", "token", "id", *[f"x[i,{c}]" for c in range(columns)], left=(1,))
        for i, label in enumerate(self.lesson.labels):
            cells = [] if around is None else [f"{n:.3f}" for n in around.x[i, :columns]]
            made.add_row(str(i), self._label(i, label), str(self.lesson.ids[i]), *cells)
        self._print(made)
        if around is not None:
            self._dim(self.say("terminal_first", shown=columns, total=around.x.shape[1]))

    def _qkv(self) -> None:
        lesson, i = self.lesson, self.i
        if lesson.kv_heads != lesson.heads:
            self._text(self.say("step2_shared"))
        self._caption(self.say("step2_of"))
        columns = self._fit(18)
        made = self._table("", "length", *[f"[{i},{c}]" for c in range(columns)], left=(0,))
        vectors = (("q", lesson.q()[i]), ("k", lesson.k()[i]), ("v", lesson.v()[i]))
        for name, vector in vectors:
            made.add_row(
                f"[bold]{name}[/]", f"{formula.norm(vector):.2f}", *[f"{n:.3f}" for n in vector[:columns]]
            )
        self._print(made)
        self._dim(self.say("terminal_first", shown=columns, total=lesson.head_dim))
        if lesson.projection is None:
            self._text(self.say(lesson.why), "yellow")
            return
        c = int(np.abs(lesson.q()[i] * lesson.k()[self.j]).argmax())  # the one that step 3 needs most
        self._opened(self.book.open(f"q[{i},{c}]"))
        if lesson.projection.cos is not None:
            self._text(self.say("step2_rotation"))
            self._opened(self.book.open(f"raw_q[{i},{c}]"))

    def _scores(self) -> None:
        lesson, i = self.lesson, self.i
        self._text(self.say("step3_cosine"))
        flat = plane(lesson.q()[i], lesson.k())
        self._caption(self.say("step3_row"))
        names = ("token", "|i−j|", "|k|", "angle", "cosine", "q·k")
        made = self._table(*names, "plane_along", "plane_beside", left=(0,))
        dot = lesson.dots()[i]
        for j in self._kept(range(len(lesson))):
            k = lesson.k()[j]
            cosine = formula.cosine(lesson.q()[i], k)
            made.add_row(
                self._label(j),
                str(abs(i - j)),
                f"{formula.norm(k):.1f}",
                f"{np.degrees(np.arccos(np.clip(cosine, -1, 1))):.0f}°",
                f"{cosine:.3f}",
                f"{dot[j]:.2f}",
                f"{flat.along[j]:.2f}",
                f"{flat.beside[j]:.2f}",
            )
        self._print(made)
        self._cut(range(len(lesson)), self.weights[i])
        self._opened(self.book.open(f"dot[{i},{self.j}]"))
        self._caption(self.say("plane_title") + f"  (|q| = {flat.query:.2f})")
        self._text(self.say("plane_text"))
        self._text(self.say("plane_residual", residual=percent(flat.residual)), "bold")

    def _scale(self) -> None:
        self._opened(self.book.open(f"scaled[{self.i},{self.j}]"))
        self._text(self.say("step4_drawn"))
        self._measured(spread.drawn())
        self._text(self.say("step4_gradient"))
        self._caption(self.say("step4_real"))
        self._measured(spread.real(self.lesson))
        self._text(self.say("step4_real_note"))

    def _measured(self, lines: Sequence[spread.Measured]) -> None:
        names = ("d", "1/√d", "spread", "largest", "entropy", "slope", "saturated")
        made = self._table(*names, left=(1,))
        for k, line in enumerate(lines):
            made.add_row(
                str(line.dim) if k % 2 == 0 else "",
                self.say("on" if line.scaled else "off"),
                f"{line.spread:.2f}",
                f"{line.largest:.3f}",
                f"{line.entropy:.3f}",
                f"{line.slope:.3f}",
                f"{100 * line.saturated:.0f} %",
                style="bold" if line.scaled else "",
                end_section=line.scaled,
            )
        self._print(made)

    def _mask(self) -> None:
        lesson, i = self.lesson, self.i
        self._text(self.say("step5_own_on" if lesson.masked else "step5_own_off"))
        made = self._table("token", "step5_with", "", "step5_without", "", left=(0, 2, 4))
        on, off = lesson.weights(mask=True)[i], lesson.weights(mask=False)[i]
        size = 14 if self.width < 100 else 24
        for j in self._kept(range(len(lesson)), np.maximum(on, off)):
            hidden = not lesson.seen[i, j]
            first = [f"[dim]{self.say('hidden')}[/]", ""] if hidden else [f"{on[j]:.4f}", bar(on[j], size)]
            made.add_row(self._label(j), *first, f"{off[j]:.4f}", bar(off[j], size))
        self._print(made)
        self._cut(range(len(lesson)), off, np.maximum(on, off))

    def _softmax(self) -> None:
        lesson, i = self.lesson, self.i
        row, score = self.weights[i], lesson.scores()[i]
        self._caption(self.say("step6_row"))
        made = self._table("token", "scaled", "e^(s−max)", "weight", "", left=(0, 4))
        seen = np.flatnonzero(lesson.visible()[i]).tolist()
        for j in self._kept(seen, row):
            made.add_row(
                self._label(j),
                f"{score[j]:.3f}",
                f"{self.book.raised[i, j]:.4f}",
                f"[bold]{row[j]:.4f}[/]",
                bar(row[j], 20 if self.width < 100 else 50),
            )
        made.add_row(
            self.say("sum"), "", f"{self.book.raised[i].sum():.4f}", f"{row.sum():.4f}", "", style="dim"
        )
        self._print(made)
        self._cut(seen, row)
        self._opened(self.book.open(f"weight[{i},{self.j}]"))
        self._matrix()
        self._text(self.say("step6_temperature"))
        made = self._table("temperature", "reads", "weight", "entropy", "slope", left=(1,))
        for t in (0.5, 1.0, 2.0, 4.0):
            warm = lesson.weights(temperature=t)[i]
            top = int(warm.argmax())
            made.add_row(
                f"T = {t:g}",
                self._label(top),
                f"{warm[top]:.4f}",
                f"{formula.entropy(warm):.3f}",
                f"{formula.slope(warm):.3f}",
            )
        self._print(made)

    def _matrix(self) -> None:
        """All of A where it fits, two signs a weight."""
        lesson, n = self.lesson, len(self.lesson)
        names = max(Text(shown(label)).cell_len for label in lesson.labels)
        if names + 4 + 5 * n > self.width:
            self._dim(self.say("terminal_matrix"))
            return
        self._caption(self.say("step6_matrix"))
        head = Text(" " * (names + 4))
        for j in range(n):
            head.append(f"{j:>5}", "dim")
        self._print(head)
        for i, label in enumerate(lesson.labels):
            line = Text().append(shown(label), "bold reverse" if i == self.i else "")
            line.append(" " * (names - line.cell_len)).append(f"{i:>3} ", "dim")
            for j in range(n):
                weight = self.weights[i, j]
                if not lesson.visible()[i, j]:
                    line.append("    ·", "dim")
                elif weight < 0.005:
                    line.append("   .0", "dim")
                else:
                    style = "bold cyan" if weight >= 0.3 else "cyan" if weight >= 0.1 else ""
                    line.append(f" {weight:.2f}"[:5].replace("0.", " .") if weight < 1 else "    1", style)
            self._print(line)

    def _mix(self) -> None:
        lesson, i = self.lesson, self.i
        values, row = lesson.v(), self.weights[i]
        columns = self._fit(30)
        self._caption(self.say("step7_contributions"))
        made = self._table("token", "weight", *[f"[{c}]" for c in range(columns)], left=(0,))
        seen = np.flatnonzero(lesson.visible()[i]).tolist()
        kept = self._kept(seen, row)
        for j in kept:
            made.add_row(self._label(j), f"{row[j]:.4f}", *[f"{row[j] * x:.4f}" for x in values[j, :columns]])
        made.add_section()
        made.add_row(
            "[bold]z[/]", f"{row.sum():.4f}", *[f"[bold]{x:.4f}[/]" for x in lesson.output()[i, :columns]]
        )
        self._print(made)
        self._cut(seen, row)
        self._dim(self.say("terminal_first", shown=columns, total=values.shape[1]))
        c = int(np.abs(lesson.output()[i]).argmax())
        self._opened(self.book.open(f"z[{i},{c}]"))

    def _heads(self) -> None:
        lesson, i, around = self.lesson, self.i, self.lesson.projection
        self._caption(self.say("step8_heads"))
        size = 10 if self.width < 100 else 30
        names = ("head", "reads", "weight", "", "entropy")
        made = self._table(*names, *(() if around is None else ("write_size",)), left=(1, 3))
        for h in range(lesson.heads):
            row = lesson.weights(h)[i]
            top = int(row.argmax())
            cells: list[str | Text] = [
                str(h),
                self._label(top),
                f"{row[top]:.4f}",
                bar(row[top], size),
                f"{formula.entropy(row):.3f}",
            ]
            if around is not None:
                cells.append(f"{around.shares[h, i]:.2f}")
            made.add_row(*cells, style="bold" if h == lesson.head else "")
        self._print(made)
        if around is None:
            self._text(self.say(lesson.why), "yellow")
            return
        self._caption(self.say("step8_norms"))
        made = self._table("", "length", left=(0,))
        before, added = around.residual[i].astype(np.float64), around.attention[i].astype(np.float64)
        lines: list[tuple[str, float]] = [
            ("step8_residual", float(formula.norm(before))),
            ("step8_attention", float(formula.norm(added))),
            ("step8_this", float(around.shares[lesson.head, i])),
            ("step8_out", float(formula.norm(before + added))),
        ]
        for name, size_of in lines:
            made.add_row(self.say(name), f"{size_of:.2f}")
        self._print(made)
        m = int(np.abs(lesson.output()[i] @ around.wo.T).argmax())
        self._opened(self.book.open(f"out[{i},{m}]"))
        self._opened(self.book.open(f"o[{i},{m}]"))

    def _examples(self, step: int) -> None:
        for example in exact.examples():
            if example.step != step:
                continue
            self.console.print()
            self._caption(self.say("exact_title"))
            self._text(self.say(example.key))
            grid = Table.grid(padding=(0, 2))
            for label, numbers in example.lines:
                name = self.say(f"label_{label[1:]}") if label.startswith("@") else label
                grid.add_row(f"  {name}", Text(numbers.replace("], [", "]\n[")))
            self._print(grid)

    def _end(self) -> None:
        self.console.print()
        self._print(Rule(f"[bold]{escape(self.say('provenance'))}[/]", align="left", style="cyan"))
        grid = Table.grid(padding=(0, 2))
        for name, value in self.tell.provenance():
            grid.add_row(f"[dim]{escape(name)}[/]", escape(value))
        self._print(grid)
        self.console.print()
        self._text(self.say("terminal_open"))
        self._text(self.say("terminal_html"))
        self._text(self.say("caution"), "yellow")

    # What the parts are made of.

    def _opened(self, it: Opened, most: int | None = TERMS) -> None:
        """A number as its products, the largest first where not all are shown."""
        self._print(
            Text.assemble(
                ("  " + it.name, "bold cyan"), f" = {it.formula}" if it.formula else "", f" = {it.value:.6g}"
            )
        )
        if it.leaf:
            self._dim(self.say("leaf"))
        if it.wrap and np.isneginf(it.plus[0][1]):
            self._dim(self.say("absent"))
            return
        terms = it.terms
        order = sorted(range(len(terms)), key=lambda t: -abs(terms[t].product))
        kept = range(len(terms)) if most is None or len(terms) <= most else order[:most]
        grid = Table.grid(padding=(0, 1))
        for _ in range(2):
            grid.add_column(justify="right")
        for _ in range(5):
            grid.add_column()
        for t in kept:
            term = terms[t]
            grid.add_row(
                "   " + term.left,
                f"{term.a:.5g}",
                "×",
                f"{term.b:.5g}",
                f"[dim]{term.right}[/]",
                "=",
                f"{term.product:.5g}",
            )
        if (rest := len(terms) - len(kept)) > 0:
            others = sum(terms[t].product for t in order[len(kept) :])
            words = self.say("rest_terms", count=rest)
            self._print(grid)
            self._print(Text.assemble("     ", (words, "dim"), f"  {others:.5g}"))
            grid = Table.grid(padding=(0, 1))
        for name, value in it.plus:
            grid.add_row("   " + name, f"{value:.5g}")
        if grid.row_count:
            self._print(grid)

    def _kept(self, places: Iterable[int], by: Array | None = None) -> list[int]:
        """The places to show, in order: all, or the largest by weight."""
        by = self.weights[self.i] if by is None else by
        listed = [int(j) for j in places]
        if len(listed) <= FEW + 2:
            return listed
        return sorted(sorted(listed, key=lambda j: -by[j])[:FEW])

    def _cut(self, places: Sequence[int], row: Array, by: Array | None = None) -> None:
        """Say what a table left out: how many of its places, and how much of the row."""
        kept = self._kept(places, row if by is None else by)
        if len(kept) < len(places):
            mass = percent(float(row[kept].sum()))
            self._dim(self.say("terminal_keys", shown=len(kept), total=len(places), mass=mass))

    def _fit(self, used: int) -> int:
        """How many numbers of nine columns fit beside what is used already."""
        return max(2, min(10, (self.width - used) // 9 - 1))

    def _table(self, *names: str, left: tuple[int, ...] = ()) -> Table:
        made = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim", padding=(0, 1))
        for k, name in enumerate(names):
            title = self.say(name) if name in self.tell.words else name
            made.add_column(escape(title), justify="left" if k in left else "right", overflow="fold")
        return made

    def _label(self, i: int, label: str | None = None) -> Text:
        text = shown(self.lesson.labels[i] if label is None else label)
        return Text(text, "bold reverse" if i == self.i else "bold" if i == self.j else "")

    def _print(self, what: object) -> None:
        self.console.print(what, width=self.width)

    def _text(self, words: str, style: str = "") -> None:
        if self.tell.language == "ja":  # rich breaks at spaces, and Japanese has none
            words = "\n".join(wrap(words, self.width))
        self._print(Text(words, style))

    def _dim(self, words: str) -> None:
        self._text(words, "dim")

    def _caption(self, words: str) -> None:
        self._text(words, "bold")


def bar(share: float, width: int) -> str:
    """A bar of eighths of a column."""
    eighths = round(share * width * 8)
    full, part = divmod(eighths, 8)
    return f"[cyan]{'█' * full}{BLOCKS[part].strip()}[/]"
