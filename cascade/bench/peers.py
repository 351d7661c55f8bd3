"""What transformers offers on the same weights: plain decoding, prompt lookup, assisted generation, both nested.

It gets them as it loads them itself: the layout that this engine keeps bfloat16 weights in on CPUs is ours.

Every call has a generation config of its own, so that none of a checkpoint's defaults (penalties, filters) is in
force, and ends where this engine's answers end. Whatever a call changes is put back, also when it fails.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from cascade.bench.questions import Question, prompt_for
from cascade.bench.systems import PeerError, Run, System, chain, token_ids
from cascade.errors import first_line
from cascade.level import Level
from cascade.prepack import unpacked

if TYPE_CHECKING:
    from cascade.config import SamplingParams
    from cascade.engine import Engine


@dataclass(frozen=True)
class Recipe:
    """How a system calls `generate`.

    Attributes:
        description: for people.
        target: settings of the target's generation config, besides length, end and sampling.
        assistant: settings of the assistant's own; None where there is no assistant.
    """

    description: str
    target: Mapping[str, Any]
    assistant: Mapping[str, Any] | None = None

    @property
    def batches(self) -> bool:
        """Whether it can answer several questions in one call."""
        return not self.target and self.assistant is None


# As the library's documentation recommends, or its defaults.
LOOKUP = {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": 2}
ASSISTED = {
    "num_assistant_tokens": 20,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.4,
}

RECIPES = {
    "hf-plain": Recipe("transformers, generate", {}),
    "hf-pld": Recipe("transformers, prompt lookup", LOOKUP),
    "hf-assisted": Recipe("transformers, assisted by the draft model", {}, ASSISTED),
    # Prompt lookup in the target's config would replace the assistant; in the assistant's it serves the assistant.
    "hf-nested": Recipe("transformers, prompt lookup under the draft model", {}, {**ASSISTED, **LOOKUP}),
}


def peers(engine: Engine, names: Sequence[str], batch: int) -> tuple[list[System], dict[str, str]]:
    """The systems of these names that can be had on an engine's models, and why the others cannot.

    Args:
        engine: whose target, and highest model below it as the assistant, they use.
        names: keys of `RECIPES`.
        batch: questions decoded at a time.
    """
    models = {name: part.model for name, part in chain(engine) if isinstance(part, Level)}
    modules = {name: getattr(model, "module", None) for name, model in models.items()}
    *below, target = models
    found: list[System] = []
    skipped = {}
    for name in names:
        recipe = RECIPES[name]
        used = [target] if recipe.assistant is None else [target, *below[-1:]]
        foreign = [level for level in used if getattr(modules[level], "generation_config", None) is None]
        if foreign:
            skipped[name] = f"level {foreign[0]} is no transformers model that can generate"
        elif recipe.assistant is not None and not below:
            skipped[name] = "there is no draft model below the target"
        elif batch > 1 and not recipe.batches:
            skipped[name] = "transformers runs assisted generation at batch 1 only"
        else:
            found.append(Peer(name, recipe, engine, modules, batch))
    return found, skipped


class Peer:
    """A way of transformers to answer; see `System`.

    Args:
        name: as in `RECIPES`.
        recipe: how it calls `generate`.
        engine: whose tokenizer, end tokens and limits hold.
        modules: by level name, bottom to top, the transformers models; None for a model that is none. The last
            one answers, and the one before it assists, where the recipe has an assistant.
        batch: how many questions it answers at a time; all of them end before the next begin.
    """

    def __init__(self, name: str, recipe: Recipe, engine: Engine, modules: Mapping[str, Any], batch: int = 1) -> None:
        self.name, self.description = name, recipe.description
        self.settings: Mapping[str, Any] = {**recipe.target, **(recipe.assistant or {})}
        self._recipe, self._engine, self._modules, self._batch = recipe, engine, modules, batch
        self._model: Any = engine.model  # one of transformers, with a tokenizer
        *below, self._target = modules.values()
        self._assistant = below[-1] if recipe.assistant is not None else None

    def run(self, questions: Sequence[Question], params: SamplingParams, detailed: bool = False) -> list[Run]:
        """See `System.run`. What the library raises, whatever it is, becomes PeerError."""
        prompts = [prompt_for(self._engine, question) for question in questions]
        runs: list[Run] = []
        try:
            for start in range(0, len(prompts), self._batch):
                runs += self._measured(prompts[start : start + self._batch], params)
        except Exception as error:
            raise PeerError(f"{type(error).__name__}: {first_line(error)}") from error
        calls = {id(run["batch"]): run["batch"] for run in runs}.values()
        for run in runs:
            together = {key: sum(call[key] for call in calls) for key in ("size", "wall_s", "forwards")}
            run["batch"] = together if len(runs) > 1 else None
        return runs

    def _measured(self, prompts: Sequence[Any], params: SamplingParams) -> list[Run]:
        timeline, counters = Timeline(), {}
        with contextlib.ExitStack() as stack:
            stack.enter_context(quiet())
            for level, module in self._modules.items():
                counters[level] = stack.enter_context(counting(module)) if module is not None else Counter()
                if module in (self._target, self._assistant):
                    stack.enter_context(unpacked(module))
            began = time.perf_counter()
            texts = [token_ids(self._engine, prompt) for prompt in prompts]
            rooms = [self._room(text, params) for text in texts]
            rows = self._generate(texts, max(rooms), params, timeline)
            answers = [self._cut(row, room) for row, room in zip(rows, rooms, strict=True)]
            decoded = [self._model.decode(answer) for answer in answers]
            wall = time.perf_counter() - began
        forwards = {level: counter.forwards for level, counter in counters.items()}
        fed = {level: counter.tokens // len(texts) for level, counter in counters.items()}
        shared = {"size": len(texts), "wall_s": wall, "forwards": next(reversed(forwards.values()))}
        runs = []
        for text, answer, words in zip(texts, answers, decoded, strict=True):
            first, last, own = timeline.of(len(answer))
            run = {
                "batch": shared,
                "prompt_tokens": len(text),
                "new_tokens": len(answer),
                "wall_s": wall if len(texts) == 1 else last - began,
                "first_token_s": first - began,
                "first_tokens": min(timeline.first_tokens, len(answer)),
                "target_forwards": own,
                "finish_reason": "stop" if answer[-1] in self._model.end_ids else "length",
                "tokens": answer,
                "text": words,
                "forwards": dict(forwards),
                "tokens_fed": dict(fed),
            }
            runs.append({**run, "origins": None, "stats": None, "pieces": None, "rounds": None})
        return runs

    def _room(self, text: Sequence[int], params: SamplingParams) -> int:
        """How many tokens may follow a prompt."""
        limit = self._engine.max_length
        return params.max_new_tokens if limit is None else min(params.max_new_tokens, limit - len(text))

    def _generate(
        self, texts: Sequence[Sequence[int]], most: int, params: SamplingParams, timeline: Timeline
    ) -> list[list[int]]:
        """What `generate` appends to each prompt: at most `most` tokens, padded behind an end token."""
        target, ends = self._target, list(self._model.end_ids)
        pad = getattr(self._model.tokenizer, "pad_token_id", None)
        pad = pad if pad is not None else ends[0] if ends else 0
        width = max(map(len, texts))
        ids = torch.tensor([[pad] * (width - len(text)) + list(text) for text in texts], device=target.device)
        mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in texts], device=target.device)
        common = {"pad_token_id": pad, "eos_token_id": ends or None}
        own = {**common, "max_new_tokens": most, "use_cache": True, **_sampling(params), **self._recipe.target}
        options = {} if self._assistant is None else {"assistant_model": self._assistant}
        with contextlib.ExitStack() as stack:
            settings = stack.enter_context(configured(target, own))
            if self._assistant is not None:
                stack.enter_context(configured(self._assistant, {**common, **(self._recipe.assistant or {})}))
            if params.temperature > 0:
                stack.enter_context(seeded(params.seed or 0, target.device))
            out = target.generate(ids, attention_mask=mask, generation_config=settings, streamer=timeline, **options)
        rows: list[list[int]] = out[:, width:].tolist()
        return rows

    def _cut(self, row: list[int], room: int) -> list[int]:
        """A row without what follows its end token or exceeds its room."""
        ends = self._model.end_ids
        end = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        return row[: min(end, room)]


class Timeline:
    """A streamer: `generate` hands it the prompt, then what each forward of the target brought."""

    def __init__(self) -> None:
        self._rows = 0
        self._times: list[float] = []
        self._tokens: list[int] = []  # of each row, up to then

    def put(self, value: torch.Tensor) -> None:
        """Prompts [R, L], then tokens [R] or, of one row, [1, N]."""
        now = time.perf_counter()
        if not self._rows:
            self._rows = len(value)
            return
        before = self._tokens[-1] if self._tokens else 0
        self._times.append(now)
        self._tokens.append(before + value.numel() // self._rows)

    def end(self) -> None:
        """Nothing more comes."""

    @property
    def first_tokens(self) -> int:
        """How many tokens came at first."""
        return self._tokens[0]

    def of(self, count: int) -> tuple[float, float, int]:
        """When the first and the last of `count` tokens came, and with which forward, counted from 1, the last did."""
        place = next(i for i, tokens in enumerate(self._tokens) if tokens >= count)
        return self._times[0], self._times[place], place + 1


@dataclass
class Counter:
    """What went through a module: forwards, and tokens of all rows, padding included."""

    forwards: int = 0
    tokens: int = 0


@contextlib.contextmanager
def counting(module: Any) -> Iterator[Counter]:
    """Counts a module's forwards."""
    counter = Counter()

    def note(module: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        ids = options["input_ids"] if "input_ids" in options else args[0]
        counter.forwards += 1
        counter.tokens += ids.numel()

    handle = module.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield counter
    finally:
        handle.remove()


@contextlib.contextmanager
def configured(module: Any, settings: Mapping[str, Any]) -> Iterator[Any]:
    """Gives a module a generation config with these settings and no others; its own is put back."""
    own = module.generation_config
    module.generation_config = type(own)(**settings)
    try:
        yield module.generation_config
    finally:
        module.generation_config = own


def _sampling(params: SamplingParams) -> dict[str, Any]:
    """The settings that choose tokens as `params` say. All are named: an unnamed one has a default."""
    if params.temperature == 0:
        return {"do_sample": False}
    filters = {"temperature": params.temperature, "top_k": params.top_k, "top_p": params.top_p}
    return {"do_sample": True, **filters}


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Lends torch's own generator a seed's state: `generate` samples from that one and takes no other."""
    place: Any = torch.cuda if device.type == "cuda" else torch
    where = (device,) if device.type == "cuda" else ()
    state = place.get_rng_state(*where)
    place.set_rng_state(torch.Generator(device).manual_seed(seed).get_state(), *where)
    try:
        yield
    finally:
        place.set_rng_state(state, *where)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps back advice of transformers that is meant for whoever wrote the call."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
