"""Recordings: a text, and what each level's model would have said at every position of it.

`record` makes them with a real engine, `synthetic` by chance; `cascade.simulate` repeats them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cascade.config import SamplingParams
from cascade.draft import Tokens
from cascade.errors import ConfigError, DecodeError

if TYPE_CHECKING:
    from cascade.engine import Engine
    from cascade.level import Level
    from cascade.result import Result

BEST = 8  # tokens per position: trees consider four
SPAN = 64  # positions of an answer in one forward: each has logits of a whole vocabulary
MADE_UP = 4096  # ids of synthetic texts: few n-grams come twice


@dataclass(frozen=True)
class Said:
    """What one level's model found likeliest at each position of an answer, given the text before it.

    Attributes:
        ids: int64 [N, B], the one that it would propose first at column 0, then those that it would branch to.
        chances: float32 [N, B]. Column 0 is how sure the model is: the probability of its best token. The others
            divide what that leaves as the engine's trees do. 0: nothing was said.
    """

    ids: Tokens
    chances: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.ids)

    def at(self, places: Any) -> Said:
        """What was said at some positions."""
        return Said(self.ids[places], self.chances[places])


@dataclass(frozen=True)
class Recording:
    """One request, to be repeated by `cascade.simulate`.

    Attributes:
        prompt: its ids.
        tokens: the answer's ids, [N].
        said: by level name; position i speaks about `tokens[i]`.
        category, question_id: of the question, if it was one.
        result: what it took when it was recorded; not saved.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    said: Mapping[str, Said] = field(default_factory=dict)
    category: str = ""
    question_id: str | int | None = None
    result: Result | None = field(default=None, compare=False, repr=False)


def synthetic(
    rights: NDArray[np.bool_], *, level: str = "draft", prompt: int = 32, second_right: float = 0.35, seed: int = 0
) -> Recording:
    """A recording of one draft level that is right where told.

    Its chances are calibrated: of the tokens of which it is 70 % sure, 70 % are right. Their spread is that of
    Beta(a, 1 - a), with the mean of `rights` as a.

    Args:
        rights: [N], whether the level's first token is the answer's.
        level: its name.
        prompt: tokens of the prompt.
        second_right: the share of positions with a wrong first token where the second one is right.
        seed: of all that is left to chance.
    """
    rights = np.asarray(rights, bool)
    count, rng = len(rights), np.random.default_rng(seed)
    tokens, other = rng.integers(0, MADE_UP, count), MADE_UP + rng.integers(0, MADE_UP, count)
    seconds = ~rights & (rng.random(count) < second_right)
    share = min(max(float(rights.mean()) if count else 0.5, 0.02), 0.98)
    sure = rng.beta(share + rights, 1.0 - share + ~rights).clip(0.02, 0.999)
    first, second = np.where(rights, tokens, other), np.where(seconds, tokens, other + MADE_UP)
    chances = np.stack([sure, second_right * (1.0 - sure)], 1).astype(np.float32)
    said = Said(np.stack([first, second], 1).astype(np.int64), chances)
    return Recording(tuple(rng.integers(0, MADE_UP, prompt).tolist()), tuple(tokens.tolist()), {level: said})


# -- with a real engine ------------------------------------------------------------------------------------


def record(
    engine: Engine,
    prompts: Sequence[Any],
    params: SamplingParams | None = None,
    categories: Sequence[str] | None = None,
    *,
    speculate: bool = True,
    question_ids: Sequence[str | int] | None = None,
    progress: Callable[[str], None] | None = None,
) -> list[Recording]:
    """Decodes prompts one after the other, and lets all models below the target read the answers.

    What they say is what they would have drafted: under temperature 0 the likeliest tokens, else their own samples
    with the request's random numbers, as the rule `coupled` has it. Requests without a seed get their number as one.

    Args:
        engine: the cascade.
        prompts: as `Engine.generate` takes them.
        params: of all requests.
        categories, question_ids: of each prompt.
        speculate: False decodes plainly, as do `params` that say so. The text is the same.
        progress: called with a line of text before each prompt.

    Returns:
        A recording per prompt, each with its `result`.

    Raises:
        ConfigError: `params` that cannot be used.
        PromptError, DecodeError: a prompt that cannot be decoded.
    """
    params = SamplingParams() if params is None else params
    if params.n != 1:
        raise ConfigError(f"a recording is of one sample: n must be 1, not {params.n}")
    recordings = []
    for number, prompt in enumerate(prompts):
        if progress:
            progress(f"recording {number + 1} of {len(prompts)}")
        seed = number if params.seed is None else params.seed
        one = replace(params, seed=seed, speculate=speculate and params.speculate)
        category = "" if categories is None else categories[number]
        question = None if question_ids is None else question_ids[number]
        recordings.append(replace(_record(engine, prompt, one), category=category, question_id=question))
    return recordings


def _record(engine: Engine, prompt: Any, params: SamplingParams) -> Recording:
    from cascade.prompts import encode

    own = getattr(engine.model, "encode", None)
    ids = own(prompt) if own is not None else encode(None, prompt, engine.target.name)
    result = engine.generate(list(ids), params)
    if result.error is not None:
        raise DecodeError(f"a prompt cannot be recorded: {result.error}")
    lower = [level for level in engine.chain.levels if not level.is_target]
    said = {level.name: heard(level, ids, result.tokens, params) for level in lower}
    return Recording(tuple(ids), tuple(result.tokens), said, result=result)


def heard(level: Level, prompt: Sequence[int], tokens: Sequence[int], params: SamplingParams, best: int = BEST) -> Said:
    """What a level's model says at each position of an answer, if it is fed with the text; [N, best].

    Nothing at positions beyond the model's context. Changes nothing but the level's model's own counters.
    """
    from cascade.noise import Noise
    from cascade.rows import Feed, Scores
    from cascade.sampling import Sampler

    seed = 0 if params.seed is None else params.seed
    sampler = Sampler(params.for_request(), Noise(seed), level.end_ids, len(prompt), draft=True)
    text, row = np.array([*prompt, *tokens], np.int64), level.model.new_row()
    ids, chances = np.zeros((len(tokens), best), np.int64), np.zeros((len(tokens), best), np.float32)
    limit = len(text) if level.model.max_length is None else level.model.max_length
    for start, stop in _spans(len(prompt), min(len(text) - 1, limit)) if tokens else ():
        keep = stop - start if start else 1
        logits = level.score([Feed(row, text[start:stop].tolist(), keep)])
        sure = Scores.of(logits, greedy=False, sure=True).chances
        assert sure is not None
        for i, prefix in enumerate(range(stop - keep + 1, stop + 1)):
            branches = sampler.branches(logits[i], text[:prefix], best, sampler.noise)
            place, count = prefix - len(prompt), len(branches)
            ids[place, :count] = [branch.token for branch in branches]
            chances[place, :count] = [sure[i], *((1.0 - sure[i]) * branch.share for branch in branches[1:])]
    return Said(ids, chances)


def _spans(prompt: int, stop: int) -> Iterator[tuple[int, int]]:
    """The prompt, then the rest of a text in pieces, as (start, stop); nothing if the prompt is too long."""
    if prompt <= stop:
        yield 0, prompt
        for start in range(prompt, stop, SPAN):
            yield start, min(start + SPAN, stop)


def overhead_of(results: Iterable[Result]) -> float:
    """Seconds of the engine's own work per forward of any model; proposals of drafters that are no models left out."""
    seconds, forwards = 0.0, 0
    for stats in (result.stats for result in results):
        others = sum(level.time_s for level in stats.levels if not level.forwards)
        seconds += max(stats.own_work_s - others, 0.0)
        forwards += sum(level.forwards for level in stats.levels)
    return seconds / forwards if forwards else 0.0


# -- files -------------------------------------------------------------------------------------------------


def save_recordings(path: str | Path, recordings: Iterable[Recording]) -> None:
    """Writes a line of JSON for each; chances keep four digits. Raises ConfigError."""
    lines = []
    for one in recordings:
        said = {
            name: {"ids": said.ids.tolist(), "chances": [[float(f"{c:.4g}") for c in line] for line in said.chances]}
            for name, said in one.said.items()
        }
        head = {"category": one.category, "question_id": one.question_id}
        lines.append(
            json.dumps({**head, "prompt": one.prompt, "tokens": one.tokens, "said": said}, separators=(",", ":"))
        )
    try:
        Path(path).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write the recordings {str(path)!r}: {error.strerror}") from None


def load_recordings(path: str | Path) -> list[Recording]:
    """The recordings of a file.

    Raises:
        ConfigError: names the file, and the line that is at fault.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the recordings {str(path)!r}: {error.strerror}") from None
    recordings = []
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            try:
                recordings.append(_parsed(json.loads(line)))
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
                raise ConfigError(f"{path}, line {number}: this is no recording: record it again") from None
    if not recordings:
        raise ConfigError(f"{path} has no recordings: each is a JSON object on a line of its own")
    return recordings


def _parsed(line: dict[str, Any]) -> Recording:
    """A line's recording. Raises whatever is wrong with it."""
    prompt, tokens = _ids(line["prompt"]), _ids(line["tokens"])
    said = {}
    for name, one in line["said"].items():
        ids = np.array([_ids(line) for line in one["ids"]], np.int64)
        chances = np.array(one["chances"], np.float32)
        if not tokens:
            ids, chances = ids.reshape(0, 1), chances.reshape(0, 1)
        if ids.shape != chances.shape or ids.ndim != 2 or len(ids) != len(tokens) or not ids.shape[1]:
            raise ValueError(name)
        if not ((chances >= 0) & (chances <= 1)).all():
            raise ValueError(name)
        said[name] = Said(ids, chances)
    category, question = line.get("category", ""), line.get("question_id")
    if not prompt or not isinstance(category, str) or not isinstance(question, (str, int, type(None))):
        raise ValueError("head")
    return Recording(prompt, tokens, said, category, question)


def _ids(values: Any) -> tuple[int, ...]:
    if not all(type(value) is int and value >= 0 for value in values):
        raise ValueError("ids")
    return tuple(values)
