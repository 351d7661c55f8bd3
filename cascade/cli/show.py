"""What a person sees: text in the colours of the levels that wrote it, tables, and loading bars.

Colours are the sixteen that a terminal's own theme defines, so they suit dark and light ones; the
target writes in the terminal's plain colour. NO_COLOR, TERM=dumb and pipes get plain text.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any

from rich.color import ColorSystem
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.style import Style
from rich.table import Table
from rich.text import Text

from cascade.text import TextStream

if TYPE_CHECKING:
    from cascade.result import Chunk, LevelStats, Result

PALETTE = ("green", "magenta", "cyan", "yellow", "blue", "red")  # bottom to top, the target has none
PIPE_WIDTH = 160  # where there is no terminal to fit, a table must not be cut for one

# A model may emit what would move a terminal's cursor or change its title; show that instead.
CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leaves a closed pipe to `cascade.cli.main` instead of ending the program here."""
        raise BrokenPipeError


def console(stream: IO[str] | None = None) -> Console:
    """A rich console on stdout, or on `stream`, that adds no colours of its own."""
    made = _Console(file=sys.stdout if stream is None else stream, highlight=False, markup=False, emoji=False)
    if not made.is_terminal:
        made = _Console(file=made.file, highlight=False, markup=False, emoji=False, width=max(PIPE_WIDTH, made.width))
    return made


def has_colours(screen: Console) -> bool:
    """Whether text on this console may be coloured."""
    return screen.is_terminal and not screen.no_color and screen.color_system is not None


def style_of(index: int, levels: int) -> Style:
    """The style of a level; the last level is the target."""
    if not 0 <= index < levels - 1:
        return Style.null()
    return Style(color=PALETTE[index % len(PALETTE)])


def legend(names: Sequence[str]) -> Text:
    """The levels' names, bottom to top, each in its colour."""
    words = [Text(name, style_of(i, len(names))) for i, name in enumerate(names)]
    words[-1].append(" (target)")
    return Text(" > ").join(words)


def authors(result: Result) -> Text:
    """How many tokens each level was the first to propose, in the levels' colours."""
    levels = result.stats.levels
    words = [
        Text(f"{level.name} {result.origins.count(i)}", style_of(i, len(levels))) for i, level in enumerate(levels)
    ]
    return Text("written by: ").append_text(Text(", ").join(words))


class Painter:
    """Writes a stream of chunks: plain, or each token in the colour of the level that wrote it.

    Chunks carry text by round, not by token, so where there are colours the tokens are decoded once
    more, one by one. What is written is always exactly the chunks' text.

    Args:
        screen: where to.
        decode: ids -> text, the model's.
        levels: how many levels the cascade has.
    """

    def __init__(self, screen: Console, decode: Callable[[Sequence[int]], str], levels: int) -> None:
        self._file = screen.file
        self._safe = screen.is_terminal
        self._styles = [style_of(i, levels) for i in range(levels)] if has_colours(screen) else []
        self._tokens = TextStream(decode)
        self._colour: list[int] = []  # of each decoded character, the level
        self.written = 0

    def chunk(self, chunk: Chunk) -> None:
        """Writes what a round added."""
        if self._styles:
            for token, origin in zip(chunk.tokens, chunk.origins, strict=True):
                self._tokens.push(token)
                self._colour += [origin] * (len(self._tokens.text) - len(self._colour))
        self.text(chunk.text)

    def text(self, text: str) -> None:
        """Writes text that follows what was written, and shows it at once."""
        if not text:
            return
        if not self._styles:
            self._file.write(self._clean(text))
        for piece, level in self._pieces(text) if self._styles else ():
            style = self._styles[level] if 0 <= level < len(self._styles) else Style.null()
            # Line by line: a colour must not reach into a line's end, where some terminals extend it.
            lines = self._clean(piece).split("\n")
            self._file.write("\n".join(style.render(line, color_system=ColorSystem.STANDARD) for line in lines))
        self._file.flush()
        self.written += len(text)

    def _clean(self, text: str) -> str:
        return text.translate(CONTROLS) if self._safe else text

    def _pieces(self, text: str) -> Iterator[tuple[str, int]]:
        """Runs of one level's characters."""
        last = len(self._styles) - 1
        colours = self._colour[self.written : self.written + len(text)]
        colours += [colours[-1] if colours else last] * (len(text) - len(colours))
        start = 0
        for end in range(1, len(text) + 1):
            if end == len(text) or colours[end] != colours[start]:
                yield text[start:end], colours[start]
                start = end


def summary(result: Result) -> Text:
    """One line on a finished request; the levels' names have the colours of their text."""
    stats = result.stats
    rate = f"{stats.new_tokens / stats.wall_s:.1f}" if stats.wall_s > 0 else "-"
    tokens = f"{stats.new_tokens} token" + ("s" if stats.new_tokens != 1 else "")
    line = Text(f"{tokens}, {stats.tokens_per_forward:.2f} per target forward, {rate} tokens/s")
    if result.finish_reason not in ("stop", "length"):
        line.append(f", {result.finish_reason}")
    for i, level in enumerate(stats.levels[:-1]):
        line.append(" | ").append(level.name, style_of(i, len(stats.levels))).append(" " + _judged(level))
    target = stats.levels[-1]
    return line.append(f" | {target.name} {target.forwards} forwards")


def _judged(level: LevelStats) -> str:
    """How a level fared: what was accepted of what was tested, and its mean K."""
    if level.alpha is not None and level.k_mean is not None:
        return f"alpha {level.alpha:.2f} K {level.k_mean:.1f}"
    return "proposed nothing"


def table(*columns: str, right: Sequence[str] = (), gap: int = 2) -> Table:
    """An empty table in the one style we use; the columns in `right` are numbers."""
    made = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    for name in columns:
        made.add_column(Text(name), justify="right" if name in right else "left", overflow="fold", vertical="bottom")
    return made


@contextlib.contextmanager
def loading(steps: int, *, lines: bool = False) -> Iterator[Callable[[str], None]]:
    """Shows on stderr what is being loaded; yields what to call with each step's name.

    Args:
        steps: how many steps there will be.
        lines: without a terminal, print a line per step instead of nothing.
    """
    screen = console(sys.stderr)
    if not screen.is_terminal:
        yield (lambda text: print(f"cascade: {text}", file=sys.stderr, flush=True)) if lines else (lambda text: None)
        return
    columns: list[Any] = [
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeElapsedColumn(),
    ]
    with Progress(*columns, console=screen, transient=True) as progress:
        task = progress.add_task("starting", total=steps + 1)

        def step(text: str) -> None:
            progress.update(task, description=text, advance=1)

        yield step
