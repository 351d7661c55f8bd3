"""What property tests draw: toy models with a tokenizer, drafters, processors, parameters, whole cascades."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from hypothesis import strategies as st

from cascade import BypassConfig, CascadeConfig, Draft, Drafter, Engine, LevelConfig, SamplingParams
from cascade.plugins import create
from cascade.testing import FixedCosts, ManualClock, ScriptedDrafter, ToyModel
from tests import twin

PLUGINS = create(entry_points=False)
LOSSLESS = [name for name in PLUGINS.names("rule") if PLUGINS.rule(name).lossless]
LAZY = [name for name in LOSSLESS if PLUGINS.rule(name).lazy]
DRAWN = [name for name in LOSSLESS if not PLUGINS.rule(name).coupled]
SHAPES = ("chain", "dynamic", (2,), (3, 2, 1), (1, 3))
BUDGETS = (1, 3, 8, 32, 32)
CONTROLLERS = PLUGINS.names("controller")

# -- a tokenizer of bytes -------------------------------------------------------------------------------

#: What each id stands for: bytes of characters, whole characters and strings; None is special, and skipped.
PIECES: list[bytes | None] = [
    *(b"a", b"b", b"\xc3", b"\xa9", b" ", b"b\xc3", None),
    *(b"\xed", b"\x95", b"\x9c", b"\xf0", b"\x9f", b"\x98", b"\x80"),  # of 한 and of 😀
    *(b"ab", "é".encode(), b" \xf0\x9f", b"\n", None, b"c", "한".encode(), b"\xff", b"abc", b"  "),
    *("😀".encode(), b"d", b"ba ", b".", b"!", b"cd", b"\xcc", b"\x81", "é b".encode(), None),
    *(b"e", b"f", b"g", b"h", b"i", b"j"),
]
#: The id that completes a character, or goes on with it.
AFTER = {2: 3, 5: 3, 7: 8, 8: 9, 10: 11, 11: 12, 16: 12, 12: 13, 30: 31}
SIZES = (7, 16, len(PIECES))


def decode(ids: Sequence[int]) -> str:
    return b"".join(PIECES[i] or b"" for i in ids).decode("utf-8", errors="replace")


class Reader(ToyModel):
    """A toy with that tokenizer, that likes to finish the characters it begins."""

    tokenizer = "pieces"

    def encode(self, prompt: Sequence[int]) -> list[int]:
        return list(prompt)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return decode(ids)

    def logits(self, prefix: Sequence[int]) -> np.ndarray:
        out = super().logits(prefix)
        after = AFTER.get(int(prefix[-1]), self.vocab_size)
        if after < self.vocab_size:
            out = out.copy()
            out[after] += 2 * self._scale
        return out

    def __repr__(self) -> str:
        shown = {"V": self.vocab_size, "seed": self._seed, "order": self._order, "scale": self._scale}
        return f"Reader({shown}, ends={self.end_ids}, max_length={self.max_length}, trees={self.trees})"


class Guess(ToyModel):
    """A draft model that shares some of a target's logits; its head may be of another size."""

    def __init__(self, target: ToyModel, share: float, seed: int = 1, more: int = 0, max_length: int | None = None):
        super().__init__(target.vocab_size + more, seed, target._order, target._scale, max_length=max_length)
        self._target, self._share = target, share

    def logits(self, prefix: Sequence[int]) -> np.ndarray:
        out = super().logits(prefix).copy()
        size = min(len(out), self._target.vocab_size)
        out[:size] += self._share * (self._target.logits(prefix)[:size] - out[:size])
        return out


# -- processors and criteria ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Ban:
    """Cheap and without state: draft levels may apply it too. Works in place."""

    token: int
    for_drafts: ClassVar[bool] = True

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.token < scores.shape[1]:
            scores[:, self.token] = -float("inf")
        return scores


@dataclass(frozen=True)
class Lean:
    """Favours a token after another; answers in float32."""

    after: int
    token: int

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.float().clone()
        if input_ids[0, -1] == self.after:
            scores[:, self.token] += 3
        return scores


class Noted:
    """Keeps the texts it is called with, for each request by itself: state that must be right."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, ...]] = []
        self.made: list[Noted] = []

    def for_request(self) -> Noted:
        mine = copy.copy(self)
        mine.calls, mine.made = [], []
        self.made.append(mine)
        return mine

    def note(self, input_ids: torch.Tensor) -> int:
        """How many calls there were before this one."""
        assert input_ids.dtype == torch.int64
        assert input_ids.dim() == 2
        self.calls.append(tuple(input_ids[0].tolist()))
        return len(self.calls) - 1

    def take(self) -> list[list[tuple[int, ...]]]:
        """The calls of every request so far, which are then forgotten."""
        made, self.made = self.made, []
        return sorted(one.calls for one in made if one.calls)

    def __repr__(self) -> str:
        shown = {key: value for key, value in vars(self).items() if key not in ("calls", "made")}
        return f"{type(self).__name__}({shown})"


class Force(Noted):
    """Counts its calls: nothing but `token` is possible once there were `after` of them."""

    def __init__(self, after: int, token: int) -> None:
        super().__init__()
        self.after, self.token = after, token

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.note(input_ids) == self.after:
            forced = torch.full_like(scores, -float("inf"))
            forced[:, self.token] = 0
            return forced
        return scores


class Fail(Noted):
    """A processor that raises after some calls."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after = after

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.note(input_ids) == self.after:
            raise ValueError("no\nmore")
        return scores


class StopAfter(Noted):
    """A criterion with state: counts its calls."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after = after

    def __call__(self, input_ids: torch.Tensor, scores: Any = None) -> bool:
        return self.note(input_ids) >= self.after


@dataclass(frozen=True)
class StopOn:
    """A criterion without state, which answers with a tensor as those of transformers do."""

    token: int

    def __call__(self, input_ids: torch.Tensor, scores: Any = None) -> torch.Tensor:
        return input_ids[:, -1] == self.token


# -- drafters -------------------------------------------------------------------------------------------


class Trees(Drafter):
    """Random trees: right and wrong branches, equal siblings, some deeper than `cap`, some beyond the budget."""

    MOST = 24  # nodes

    def __init__(self, texts: Sequence[Sequence[int]], vocab_size: int, seed: int = 0) -> None:
        self.texts, self.vocab_size = [list(text) for text in texts], vocab_size
        self.dice = np.random.default_rng(seed)

    def propose(self, asks: Sequence[Any]) -> list[Draft]:
        return [self._tree(ask) for ask in asks]

    def _tree(self, ask: Any) -> Draft:
        before = ask.context.tokens.tolist()
        truth = next((text[len(before) :] for text in self.texts if text[: len(before)] == before), [])
        tokens: list[int] = []
        parents: list[int] = []
        depths: dict[int, int] = {-1: 0}  # of what a node's children would be, as long as its path is right
        for node in range(self.dice.integers(0, min(2 * ask.cap + 4, self.MOST + 1))):
            deep = self.dice.random() < 0.5
            parent = node - 1 if deep else int(self.dice.integers(-1, node))
            depth = depths.get(parent, len(truth))
            right = depth < len(truth) and self.dice.random() < 0.6
            tokens.append(truth[depth] if right else int(self.dice.integers(self.vocab_size)))
            parents.append(parent)
            if depth < len(truth) and tokens[-1] == truth[depth]:
                depths[node] = depth + 1
        return Draft(tokens, parents)


LEAVES = ("mixed", "ngram", "oracle", "trees", "merged", "mixed", "none", "wrong", "empty", "merged", "raise")


def leaf(kind: str, texts: Sequence[Sequence[int]], vocab_size: int, seed: int = 0) -> Any:
    """A drafter without a model, None for none. For "merged" see `Case.drafter`."""
    if kind in ("none", "ngram"):
        return {"none": None, "ngram": "ngram"}[kind]
    return Trees(texts, vocab_size, seed) if kind == "trees" else ScriptedDrafter(texts, kind, vocab_size, seed=seed)


# -- what is drawn --------------------------------------------------------------------------------------

TEMPERATURES = (0.0, 0.01, 0.7, 1.0, 1.0, 1.5, 50.0)
OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "top_k": st.sampled_from([0, 0, 1, 2, 3, 5, 100]),
    "top_p": st.sampled_from([1.0, 1.0, 0.9, 0.5, 0.01]),
    "min_p": st.sampled_from([0.0, 0.0, 0.05, 0.3]),
    "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3, 0.8]),
    "ignore_eos": st.booleans(),
    "logprobs": st.none() | st.integers(0, 5),
    "bypass_threshold": st.sampled_from([None, None, 0.0, 0.0, 0.5, 1.0]),
}


@dataclass
class Case:
    """One engine, what it is asked, and what must come of it; drafters are made anew for each engine."""

    target: Reader
    prompts: list[list[int]]
    params: list[SamplingParams]
    config: dict[str, Any]
    leaf: tuple[str, int]  # kind and seed
    levels: list[LevelConfig]  # without leaf and target
    leaf_level: dict[str, Any]
    costs: dict[str, float | None]
    members: list[str | LevelConfig] = field(default_factory=list)  # of a leaf that is "merged"
    wanted: list[list[twin.Outcome]] = field(default_factory=list, repr=False)  # per prompt, per sample
    beyond: list[list[int]] = field(default_factory=list, repr=False)  # texts that know no end
    calls: list[Any] = field(default_factory=list, repr=False)  # of the twin's processors and criteria

    def __post_init__(self) -> None:
        limit = self.config.get("max_length")
        for prompt, params in zip(self.prompts, self.params, strict=True):
            samples = range(params.n)
            if self.leaf[0] not in ("none", "ngram", "empty", "raise"):
                self.beyond += [prompt + twin.plain(self.target, prompt, params, i, beyond=9).tokens for i in samples]
                take_calls([params])
            self.wanted.append([twin.plain(self.target, prompt, params, i, limit) for i in samples])
        self.calls = take_calls(self.params)

    @property
    def flawless(self) -> bool:
        """Whether no drafter has a reason to fail."""
        kinds = [self.leaf[0], *(member for member in self.members if isinstance(member, str))]
        processed = any(params.logits_processors for params in self.params)  # may leave a draft nothing to choose
        wide = "trees" in kinds and self.leaf_level["budget"] < Trees.MOST
        return "raise" not in kinds and not processed and not wide

    def drafter(self) -> Any:
        """The leaf, made anew; None for none."""
        kind, seed = self.leaf
        size = self.target.vocab_size
        if kind != "merged":
            return leaf(kind, self.beyond, size, seed)
        return [
            leaf(member, self.beyond, size, seed + i) if isinstance(member, str) else member
            for i, member in enumerate(self.members)
        ]

    def engine(self) -> Engine:
        """The cascade, with every cache checked after every round."""
        drafter = self.drafter()
        bottom = [] if drafter is None else [LevelConfig(drafter=drafter, name="leaf", **self.leaf_level)]
        levels = [*bottom, *self.levels, LevelConfig(model=self.target, name="target")]
        return self._engine(CascadeConfig(levels, **self.config))

    def alone(self) -> Engine:
        """The target and nothing else."""
        options = {key: self.config[key] for key in ("max_length", "rule") if key in self.config}
        return self._engine(CascadeConfig([LevelConfig(model=self.target, name="target")], **options))

    def _engine(self, config: CascadeConfig) -> Engine:
        costs = FixedCosts(lambda level, tokens: self.costs.get(level, 1.0))
        return Engine(config, plugins=PLUGINS, clock=ManualClock(), costs=costs, check=True)


def take_calls(params: Sequence[SamplingParams]) -> list[Any]:
    """Request by request, what its processors and criteria with state were called with."""
    things = [[*one.logits_processors, *one.stopping_criteria] for one in params]
    return [[thing.take() for thing in row if isinstance(thing, Noted)] for row in things]


def plainly(params: SamplingParams) -> SamplingParams:
    return dataclasses.replace(params, speculate=False, levels=None)


@st.composite
def targets(draw: st.DrawFn) -> Reader:
    size = draw(st.sampled_from(SIZES))
    made = Reader(
        size,
        seed=draw(st.integers(0, 999)),
        order=draw(st.integers(1, 3)),
        scale=draw(st.sampled_from([2.0, 1.0, 4.0])),
        end_ids=draw(st.sampled_from([(), (6,), (6,), (0, 4, 6)])),
        max_length=draw(st.sampled_from([None, None, None, 14, 24])),
    )
    made.trees = draw(st.sampled_from([True, True, True, False]))
    return made


@st.composite
def stop_strings(draw: st.DrawFn, text: str) -> list[str]:
    """Strings that occur in `text`, and some others."""
    found = []
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, max(0, len(text) - 1)))
        piece = text[start : start + draw(st.integers(1, 4))]
        literal = draw(st.sampled_from(["", "", "ab", "é", "a 한", "zz", "b\n", "😀", "aba"]))
        found.append(literal or piece)
        if draw(st.booleans()):
            found.insert(0, found[-1][1:])  # complete at the same token, and begins later
    return [stop for stop in found if stop and "\ufffd" not in stop]


@st.composite
def processors(draw: st.DrawFn, vocab_size: int) -> tuple[list[Any], list[Any]]:
    """Processors and criteria, with and without state."""
    ids, calls = st.integers(0, vocab_size - 1), st.integers(0, 12)
    one = st.builds(Ban, ids) | st.builds(Lean, ids, ids) | st.builds(Force, calls, ids) | st.builds(Fail, calls)
    criterion = st.builds(StopOn, ids) | st.builds(StopAfter, calls)
    return draw(st.lists(one, min_size=1, max_size=3)), draw(st.lists(criterion, max_size=2))


@st.composite
def sampling(draw: st.DrawFn, target: Reader, names: Sequence[str], prompt: list[int], want: dict[str, Any]) -> Any:
    """Parameters of one request."""
    size = target.vocab_size
    options = {key: draw(strategy) for key, strategy in OPTIONS.items() if draw(st.booleans())}
    options["max_new_tokens"] = draw(st.sampled_from([24, 16, 16, 12, 32, 20, 5, 2, 1, 0]))
    if draw(st.booleans()):
        options["min_new_tokens"] = draw(st.integers(0, min(8, options["max_new_tokens"])))
    options["temperature"] = draw(st.sampled_from(want["temperatures"]))
    options["seed"] = draw(st.integers(0, 2**64 - 1))
    options["n"] = draw(st.sampled_from(want["n"]))
    options["speculate"] = draw(st.sampled_from([True] * 7 + [False]))
    if draw(st.integers(0, 4)) == 0:
        options["levels"] = draw(st.lists(st.sampled_from(names), unique=True))
    if draw(want["ends"]):
        options["stop_token_ids"] = draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=2))
    if draw(want["processors"]):
        made = draw(processors(size))
        options["logits_processors"], options["stopping_criteria"] = made
    params = SamplingParams(**options)
    if draw(want["stops"]):
        free = twin.plain(target, prompt, params, beyond=4).text
        take_calls([params])
        params = dataclasses.replace(params, stop=draw(stop_strings(free)))
    return params


@st.composite
def guesses(draw: st.DrawFn, target: Reader) -> Guess:
    return Guess(
        target,
        share=draw(st.sampled_from([0.8, 0.5, 0.95, 1.0, 0.0])),
        seed=draw(st.integers(0, 99)),
        more=draw(st.sampled_from([0, 0, 0, 0, 3, -2])),
        max_length=draw(st.sampled_from([None, None, None, 12])),
    )


@st.composite
def model_levels(
    draw: st.DrawFn, target: Reader, least: int, most: int, bottom: bool, shapes: Sequence[Any]
) -> list[LevelConfig]:
    """Draft models between the leaf and the target, whether or not there is a leaf."""
    levels = []
    for i in range(draw(st.integers(least, most))):
        model, tree = draw(guesses(target)), draw(st.sampled_from(shapes))
        model.trees = draw(st.sampled_from([True, True, True, False]))
        tail = draw(st.sampled_from([False, False, True])) and (bottom or i > 0)
        policy = draw(control())
        tree = None if policy["controller"] == "entropy" else tree  # which stops chains
        levels.append(LevelConfig(model=model, name=f"m{i}", tail=tail, tree=tree, **policy))
    return levels


MEMBERS = ("ngram", "mixed", "oracle", "trees", "model", "wrong", "model", "raise")


@st.composite
def members(draw: st.DrawFn, target: Reader, shapes: Sequence[Any]) -> list[str | LevelConfig]:
    """What is merged at one level: kinds of leaves, and draft models."""
    made: list[str | LevelConfig] = []
    for kind in draw(st.lists(st.sampled_from(MEMBERS), min_size=1, max_size=3)):
        model = (
            LevelConfig(model=draw(guesses(target)), tree=draw(st.sampled_from(shapes))) if kind == "model" else None
        )
        made.append(kind if model is None else model)
    return made


@st.composite
def control(draw: st.DrawFn) -> dict[str, Any]:
    low = draw(st.integers(1, 3))
    high = draw(st.integers(low, 8))
    k = draw(st.none() | st.integers(low, high))
    controller, budget = draw(st.sampled_from(CONTROLLERS)), draw(st.sampled_from(BUDGETS))
    return {"k": k, "k_min": low, "k_max": high, "controller": controller, "budget": budget}


FEW, OFTEN, ALWAYS, NEVER = st.integers(0, 3).map(lambda i: i == 0), st.booleans(), st.just(True), st.just(False)


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    rows: tuple[int, int] = (1, 2),
    models: tuple[int, int] = (0, 2),
    leaves: Sequence[str] = LEAVES,
    shapes: Sequence[Any] = ("chain", *SHAPES),
    rules: Sequence[str] = ("coupled", "coupled", *LOSSLESS),
    drawn: bool = False,
    **wants: Any,
) -> Case:
    """A whole case. `wants`: temperatures, n, and how often there are stops, ends and processors.

    Where a text is only right in distribution there is nothing to compare it with: unless such cases are asked for
    (`drawn`), rules that are not coupled meet greedy requests.
    """
    target = draw(targets())
    kind = draw(st.sampled_from(leaves))
    rule = draw(st.sampled_from(rules))
    want: dict[str, Any] = {"temperatures": TEMPERATURES, "n": (1, 1, 1, 2)}
    want |= {"stops": FEW, "ends": FEW, "processors": FEW, **wants}
    if rule in DRAWN and not drawn:
        want["temperatures"] = (0.0,)
    if rule not in LAZY:  # and these refuse what needs one token after the other
        want["processors"] = NEVER
    levels = draw(model_levels(target, *models, bottom=kind != "none", shapes=shapes))
    names = [level.name for level in levels] + ([] if kind == "none" else ["leaf"])
    prompts = draw(
        st.lists(
            st.lists(st.integers(0, target.vocab_size - 1), min_size=1, max_size=8),
            min_size=rows[0],
            max_size=rows[1],
        )
    )
    least = draw(st.integers(1, 8))
    bypass = BypassConfig(
        threshold=draw(st.sampled_from([0.0, 0.0, 0.0, None, 0.3, 0.7, 1.0])),
        min_tests=draw(st.integers(1, 4)),
        probe_every=least,
        probe_max=draw(st.integers(least, 12)),
    )
    config = {"rule": rule, "bypass": bypass, "max_batch": draw(st.integers(1, 4))}
    if draw(FEW):
        config["max_length"] = draw(st.integers(9, 24))
    leaf_level = draw(control())
    if kind == "ngram":
        leaf_level["options"] = {"n_min": draw(st.integers(1, 2)), "n_max": draw(st.integers(2, 3))}
    return Case(
        target=target,
        prompts=prompts,
        params=[draw(sampling(target, [*names, "target"], prompt, want)) for prompt in prompts],
        config=config,
        leaf=(kind, draw(st.integers(0, 99))),
        members=draw(members(target, shapes)) if kind == "merged" else [],
        levels=levels,
        leaf_level=leaf_level,
        costs={name: draw(st.sampled_from([0.05, 0.05, 0.05, 0.3, 2.0, None])) for name in names},
    )
