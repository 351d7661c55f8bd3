"""Colours, in pairs: one for light pages, one for dark ones. They stay apart for colour-blind eyes too.

Figures carry the light ones; where a page is dark, its script replaces each by its partner.
"""

from __future__ import annotations

#: Levels below the target, bottom to top; the target writes in the page's grey.
LEVELS = (
    ("#b36b00", "#f0a93b"),
    ("#0072b2", "#62b5ee"),
    ("#008060", "#3ccfa0"),
    ("#b0558a", "#e59ac6"),
    ("#8a7a00", "#e6da4a"),
    ("#6a4fc4", "#a996f5"),
)
TARGET = ("#687280", "#9aa6b5")

#: Systems that are compared, the cascade first. Each has a symbol too.
SYSTEMS = (
    ("#10161f", "#f4f6f9"),
    ("#0b8285", "#45cfd2"),
    ("#7b4ab0", "#bb98ea"),
    ("#945a3c", "#dba585"),
    ("#bf3f74", "#f58bb4"),
    ("#5f6b7a", "#a4b0bf"),
)

#: Marks, as plotly calls them and as characters: colour is never the only difference.
SYMBOLS = ("diamond", "circle", "square", "triangle-up", "cross", "x")
GLYPHS = ("◆", "●", "■", "▲", "✚", "✖")

PAGE = {
    "page": ("#ffffff", "#14181e"),
    "panel": ("#f5f7f9", "#1c222a"),
    "ink": ("#1a212b", "#e8edf3"),
    "soft": ("#56606d", "#aab4c0"),
    "line": ("#dde2e8", "#343d48"),
    "loss": ("#c62828", "#ff7d70"),
    "own": ("#9aa3ae", "#667180"),
    "rest": ("#d3d8de", "#3b444f"),
    "focus": ("#1a5fd0", "#86b4ff"),
}

DARK = dict((*LEVELS, TARGET, *SYSTEMS, *PAGE.values()))


def page(name: str) -> str:
    """A colour of the page, as figures carry it."""
    return PAGE[name][0]


def level(index: int, levels: int) -> str:
    """The colour of a level; the last one is the target."""
    return TARGET[0] if index >= levels - 1 else LEVELS[index % len(LEVELS)][0]


def system(index: int) -> str:
    """The colour of the system at this place among those that are compared."""
    return SYSTEMS[index % len(SYSTEMS)][0]


def mark(index: int) -> int:
    """The place among `SYMBOLS` and `GLYPHS` of a level's mark; the diamond is the cascade's as a whole."""
    return 1 + index % (len(SYMBOLS) - 1)


def variables(levels: int) -> str:
    """The colours as CSS variables, for both themes: `--ink`, `--system-0`, `--level-0` up to the target's."""
    pairs = PAGE | {f"system-{index}": pair for index, pair in enumerate(SYSTEMS)}
    for index in range(levels):
        light = level(index, levels)
        pairs[f"level-{index}"] = (light, DARK[light])
    sides = ["".join(f"--{name}:{pair[side]};" for name, pair in pairs.items()) for side in (0, 1)]
    return f":root{{{sides[0]}}}@media (prefers-color-scheme:dark){{:root{{{sides[1]}}}}}"
