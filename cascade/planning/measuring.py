"""What a plan rests on: questions answered once by a real engine, and what its forwards take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cascade.bench.questions import Question, prompt_for
from cascade.config import SamplingParams
from cascade.costs import SURE, CostModel, Costs
from cascade.errors import ConfigError, cause_of
from cascade.recording import Recording, overhead_of, record
from cascade.rows import Feed

if TYPE_CHECKING:
    from cascade.engine import Engine
    from cascade.level import Level

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 17, 25, 33)  # tokens of a row in a forward: one more than K, and trees
CONTEXT = 256  # tokens before them, at most: attention is dearer behind long texts
PLAIN_QUESTIONS, PLAIN_TOKENS = 4, 32  # that are decoded plainly as well
OWN_WORK = 0.5e-3  # of an engine for each forward, seconds, where nobody has measured it

#: Asked where the user has no questions at hand: a piece of code, a text, a list, prose and a sum.
PROMPTS = (
    ("edit", "Rename the function to `total` and write it out again.\n\n```python\ndef add_all(values):\n    "
     "result = 0\n    for value in values:\n        result = result + value\n    return result\n```"),
    ("answer", "The ferry to Marrow Bay leaves at nine in the morning and at four in the afternoon. It takes forty "
     "minutes, and bicycles travel free. On Sundays only the morning ferry runs.\n\nWhen does the ferry leave, and "
     "what is different on Sundays?"),
    ("extract", "Write as JSON, with the keys name and town, one object for each line:\nAda Venn, Marrow Bay\n"
     "Tom Hale, Stony Ford\nIda Marsh, Low Weir"),
    ("write", "Write a short story about a lighthouse keeper who finds a letter."),
    ("explain", "Explain in a few sentences why the sky is blue."),
    ("sum", "A basket holds 12 apples. Three baskets are sold, and each apple costs 2 coins. How many coins is that? "
     "Show the steps."),
)  # fmt: skip


@dataclass(frozen=True)
class Measured:
    """What is known of a cascade's levels.

    Attributes:
        recordings: the answers, and what each level's model said in them.
        costs: what forwards take.
        overhead: the engine's own work, seconds per forward; None where nobody measured it.
        plain: tokens per second of plain decoding, as a clock had it, of `plain_of`; None where nobody measured it.
        plain_of: the recordings, or beginnings of them, that were decoded plainly.
        cascade: tokens per second of all levels while they were recorded, one question at a time.
        vocab_size: of the target; 0 where nobody knows.
    """

    recordings: Sequence[Recording]
    costs: Costs | None
    overhead: float | None = None
    plain: float | None = None
    plain_of: Sequence[Recording] = ()
    cascade: float | None = None
    vocab_size: int = 0


def built_in() -> list[Question]:
    """A handful of questions of different kinds, for a first look."""
    return [Question(i, category, prompt) for i, (category, prompt) in enumerate(PROMPTS, 1)]


def measure(
    engine: Engine,
    questions: Sequence[Question],
    params: SamplingParams | None = None,
    *,
    batch: int = 1,
    tell: Callable[[str], None] = lambda text: None,
) -> Measured:
    """Has an engine answer questions, and times what a plan needs.

    Args:
        engine: the cascade; its cost model learns.
        questions: texts, asked through the target's chat template where it has one.
        params: of all answers.
        batch: rows that will be decoded at once.
        tell: called with a line before each step.

    Raises:
        PromptError, DecodeError: a question that cannot be answered.
    """
    params = SamplingParams() if params is None else params
    warm_up = replace(params, max_new_tokens=min(8, params.max_new_tokens))
    engine.generate(prompt_for(engine, questions[0]), warm_up)
    recordings = record(
        engine,
        [prompt_for(engine, question) for question in questions],
        params,
        [question.category for question in questions],
        question_ids=[question.id for question in questions],
        progress=tell,
    )
    results = [one.result for one in recordings if one.result is not None]
    seconds = sum(result.stats.wall_s for result in results)
    cascade = sum(result.stats.new_tokens for result in results) / seconds if seconds > 0 else None
    tell("plain decoding")
    plain, plain_of = _plain(engine, recordings, params, batch)
    lengths = sorted(len(one.prompt) for one in recordings)
    for level in engine.chain.levels:
        tell(f"timing {level.name}")
        time_widths(engine, level, lengths[len(lengths) // 2], batch)
    return Measured(recordings, engine.costs, overhead_of(results), plain, plain_of, cascade, engine.model.vocab_size)


def spread(recordings: Sequence[Recording], count: int) -> list[Recording]:
    """The first `count` recordings, those of each category in turn."""
    turns: dict[str, int] = {}
    ranks = []
    for number, one in enumerate(recordings):
        turns[one.category] = turns.get(one.category, 0) + 1
        ranks.append((turns[one.category], number))
    return [recordings[number] for _, number in sorted(ranks)[:count]]


def shortened(recording: Recording, tokens: int) -> Recording:
    """The beginning of a recording."""
    said = {name: one.at(slice(tokens)) for name, one in recording.said.items()}
    return replace(recording, tokens=recording.tokens[:tokens], said=said)


def _plain(
    engine: Engine, recordings: Sequence[Recording], params: SamplingParams, batch: int
) -> tuple[float | None, list[Recording]]:
    """Tokens per second of plain decoding, and what was decoded for it."""
    some = spread([one for one in recordings if one.tokens], max(PLAIN_QUESTIONS, batch))
    some = [shortened(one, PLAIN_TOKENS) for one in some]
    asked: list[Any] = [list(one.prompt) for one in some]
    each = [
        replace(params, max_new_tokens=len(one.tokens), seed=params.seed or 0, speculate=False, n=1) for one in some
    ]
    began, tokens = engine.clock(), 0
    for start in range(0, len(some), batch):
        group = slice(start, start + batch)
        tokens += sum(len(result.tokens) for result in engine.generate(asked[group], each[group]))
    seconds = engine.clock() - began
    return (tokens / seconds if seconds > 0 and tokens else None), some


def time_widths(engine: Engine, level: Level, context: int, batch: int) -> None:
    """Times forwards of every width behind a text of `context` tokens, `batch` rows at once; the engine's costs learn.

    All widths in turn, and again: a machine whose pace changes meanwhile slows all of them alike.
    """
    model, costs, clock = level.model, engine.costs, engine.clock
    most = (model.max_length or CONTEXT + max(WIDTHS)) - max(WIDTHS)
    context = min(context, CONTEXT, most)
    if context < 1:
        return
    rows = [model.new_row() for _ in range(batch)]

    def forward(width: int) -> float:
        began = clock()
        model.forward([Feed(row, [0] * width, width) for row in rows]).max(-1).indices.tolist()
        return clock() - began

    forward(context)  # the first one also allocates
    for turn in range(SURE):
        for width in WIDTHS:
            for row in rows:
                row.crop(context)
            seconds = forward(width)
            if turn or not isinstance(costs, CostModel):
                costs.observe(level.name, width * batch, batch, seconds)


def read_costs(path: str | Path) -> CostModel:
    """The costs of a file that `Engine.save_costs` wrote, of whatever machine. Raises ConfigError."""
    from cascade.costs_file import UNREADABLE, read

    try:
        _, entries = read(Path(path).expanduser())
    except UNREADABLE as error:
        raise ConfigError(f"the costs {str(path)!r} cannot be read: {cause_of(error)}") from None
    costs = CostModel()
    for name, entry in entries.items():
        entry.restore(costs, name)
    return costs
