"""A lesson's words with its own facts put in, for the terminal and the page alike."""

from __future__ import annotations

import math

from .language import put, table
from .material import Material


def shown(label: str) -> str:
    """A token in a table: a space at either end is made visible."""
    if label.startswith(" "):
        label = "␣" + label[1:]
    return label[:-1] + "␣" if label.endswith(" ") else label or "∅"


def spoken(label: str) -> str:
    """A token in a sentence."""
    return label.strip() or shown(label)


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def target(lesson: Material) -> int:
    """The key that the followed word reads most."""
    return int(lesson.weights()[lesson.word].argmax())


class Teller:
    """The words of one language about one lesson: `say("step1_text")`."""

    def __init__(self, lesson: Material, language: str) -> None:
        self.lesson, self.language, self.words = lesson, language, table(language)
        most = target(lesson)
        width = None if lesson.projection is None else lesson.projection.x.shape[1]
        self.facts: dict[str, object] = {
            "n": len(lesson),
            "d": lesson.head_dim,
            "root": f"{math.sqrt(lesson.head_dim):.3g}",
            "width": "?" if width is None else width,
            "layer": lesson.layer,
            "head": lesson.head,
            "heads": lesson.heads,
            "kv": lesson.kv_heads,
            "model": lesson.model,
            "word": spoken(lesson.labels[lesson.word]),
            "target": spoken(lesson.labels[most]),
            "percent": percent(float(lesson.weights()[lesson.word, most])),
            "mask": self.words["on" if lesson.masked else "off"],
            "i": lesson.word,
            "j": most,
        }

    def say(self, key: str, **values: object) -> str:
        return put(self.words[key], **(self.facts | values))

    def mask(self) -> str:
        """The model's mask in words."""
        if not self.lesson.masked:
            return self.words["mask_none"]
        n = len(self.lesson)
        causal = all(int(self.lesson.own[i].sum()) == i + 1 for i in range(n))
        return self.words["mask_causal" if causal else "mask_own"]

    def provenance(self) -> list[tuple[str, str]]:
        """Where the numbers come from, line by line."""
        lesson, say = self.lesson, self.words
        made = [(say["fact_model"], lesson.model)]
        if lesson.origin:
            made.append((say["fact_origin"], lesson.origin))
        place = f"{say['layer']} {lesson.layer}, {say['head']} {lesson.head}"
        made += [
            (say["fact_layer"], place),
            (say["fact_scale"], f"{lesson.scale:.6g}"),
            (say["fact_mask"], self.mask()),
            (say["fact_gap"], f"{lesson.gap:.1e}"),
        ]
        return made
