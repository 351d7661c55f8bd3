"""The engine: prompts in, the target's own text out."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cascade.build import build_levels
from cascade.chain import Chain
from cascade.config import CascadeConfig, SamplingParams
from cascade.costs import CostModel, Costs
from cascade.errors import ConfigError, PromptError, cause_of, did_you_mean, name_of
from cascade.level import Level
from cascade.merged import Merged
from cascade.noise import sample_seed
from cascade.noise import warm_up as warm_up_noise
from cascade.prompts import check_ids, encode
from cascade.request import Request
from cascade.rules import rule_for
from cascade.sampling import for_drafts
from cascade.scheduler import Scheduler
from cascade.session import Session
from cascade.stream import AsyncStream, Stream
from cascade.trees import warm_up as warm_up_trees

if TYPE_CHECKING:
    from cascade.custom_generate import CustomGenerate
    from cascade.plugins import Plugins

Prompt = Any  # str | list[int] | list[dict[str, Any]] | dict[str, Any]


class Engine:
    """Decodes prompts through a cascade.

    Whatever is asked of an engine decodes as one batch: a list of prompts, open streams, and calls from
    several threads, which share their rounds.

    Args:
        config: the cascade.
        plugins: a plugin manager made by `cascade.plugins.create`; by default one with the built-ins,
            the installed plugins and `config.plugins`.
        clock: seconds, monotonic; costs: a cost model. Both injectable for tests and simulation. With costs of
            one's own nothing is timed when the engine is built, and `config.costs` is not read.
        check: verify every level's cache after every round.
        progress: called with a line of text while models load.

    Raises:
        CascadeError: for whatever a user can have got wrong; nothing is loaded half.
    """

    def __init__(
        self,
        config: CascadeConfig,
        *,
        plugins: Plugins | None = None,
        clock: Callable[[], float] = time.perf_counter,
        costs: Costs | None = None,
        check: bool = False,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        from cascade import plugins as plugin_module

        if not isinstance(config, CascadeConfig):
            raise ConfigError(f"Engine takes a CascadeConfig, not {type(config).__name__}: use load_config for a file")
        self.config = config
        self.plugins = plugin_module.create(*config.plugins) if plugins is None else plugins
        self.clock = clock
        self.costs = CostModel() if costs is None else costs
        self.target: Level = build_levels(config, self.plugins, self.costs, clock, progress)
        self.model = self.target.model
        self.chain = Chain(self.target)
        self.scheduler = Scheduler(self.chain, self.plugins, clock, config.max_batch, check)
        limits = [limit for limit in (config.max_length, self.model.max_length) if limit is not None]
        self.max_length = min(limits, default=None)
        self._ids = itertools.count()
        self._seeds = random.Random(config.seed)
        if costs is None:
            if progress:
                progress("measuring")
            if config.costs is not None:
                from cascade.costs_file import load_costs

                load_costs(config.costs, self)
            self._warm_up()

    # -- what users call -----------------------------------------------------------------------------

    def generate(self, prompt: Prompt, params: Any = None) -> Any:
        """Decodes one prompt, or a list of prompts as one batch.

        Args:
            prompt: a str, token ids, chat messages, a dict with "messages" and what else the chat template
                takes ("tools", ...), or a list of those.
            params: SamplingParams, or one per prompt.

        Returns:
            A `Result` for one prompt with n = 1; otherwise a flat list, prompts in order and samples
            of one prompt adjacent. In a list, a prompt that cannot be decoded has a Result with its error.

        Raises:
            ConfigError: parameters that cannot be used; nothing has begun.
            PromptError: the one prompt cannot be decoded.
        """
        if not _is_batch(prompt):
            results = self.scheduler.run(self._samples(prompt, params))
            return results[0] if len(results) == 1 else results
        return self.scheduler.run(self._batch(prompt, params))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Stream:
        """A request to iterate over: a `Chunk` per round. Closing it ends it and frees its caches.

        Raises:
            ConfigError, PromptError: at once, not at the first chunk.
        """
        return Stream(self._samples(prompt, params), self.scheduler)

    def stream_alone(self, prompt: Prompt, params: SamplingParams | None = None) -> Stream:
        """As `stream`, but its rounds serve no other request: for timing one beside another. Use one thread for all."""
        own = Scheduler(self.chain, self.plugins, self.clock, self.config.max_batch, False)
        return Stream(self._samples(prompt, params), own)

    def astream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncStream:
        """A request to iterate over in a coroutine, see `AsyncStream`. Raises as `stream` does."""
        return AsyncStream(self._samples(prompt, params), self.scheduler)

    def session(self) -> Session:
        """A conversation that keeps the caches of all levels between its turns."""
        return Session(self.scheduler, self._samples)

    def as_custom_generate(self, **options: Any) -> CustomGenerate:
        """For `model.generate(..., custom_generate=engine.as_custom_generate())`, see `CustomGenerate`."""
        from cascade.custom_generate import CustomGenerate

        return CustomGenerate(self, **options)

    def cancel(self, request_id: int) -> None:
        """Ends a request at its next round, from any thread; one that is already over stays as it is."""
        request = self.scheduler.live.get(request_id)
        if request is not None:
            request.cancelled = True

    @property
    def level_names(self) -> tuple[str, ...]:
        """The levels bottom to top, the target last: what `origins` index."""
        return tuple(place.name for place in self.chain.places)

    def summary(self) -> str:
        """The levels, their models, dtypes and what the load-time probes found, a line each."""
        rule = self.target.rule
        promise = "" if rule.coupled else ": the target's distribution, not its text for a seed"
        lines = [f"rule {self.config.rule}" + (promise if rule.lossless else " (NOT lossless)")]
        for level in self.chain.levels:
            model, role = level.model, "target" if level.is_target else "level"
            trees = "yes" if model.trees else "no, chains only"
            lines.append(f"{role} {level.name}: {model.dtype}, bit-exact: {model.exactness}, trees: {trees}")
        for governor in self.chain.governors:
            one, config = governor.drafter, governor.config
            if not isinstance(one, Level):
                what = f"merges {', '.join(one.names)}" if isinstance(one, Merged) else type(one).__name__
                lines.append(f"level {governor.name}: {what}")
            elif one.shape is not None:
                tree = config.tree or "dynamic"
                lines.append(f"level {governor.name} drafts trees: {tree}, at most {config.budget} nodes")
            elif config.tree not in (None, "chain"):
                lines.append(f"level {governor.name} drafts chains: it or what verifies it cannot do trees")
            if config.k == 0:
                lines.append(f"level {governor.name} is off: k=0")
        return "\n".join(reversed(lines))

    def save_costs(self, path: Any) -> None:
        """Writes what this engine has measured of its levels, for `CascadeConfig(costs=path)` of the next process.

        Raises:
            ConfigError: it has measured nothing, or the file cannot be written.
        """
        from cascade.costs_file import save_costs

        save_costs(path, self)

    def check_integrity(self) -> None:
        """Raises AssertionError unless every level's cache is a prefix of its request's tokens."""
        self.scheduler.check_integrity()

    def close(self) -> None:
        """Frees the models' caches and gives model objects back as they were."""
        self.scheduler.drop(list(self.scheduler.live.values()))
        for level in self.chain.levels:
            level.rows.clear()
            close = getattr(level.model, "close", None)
            if close is not None:
                close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- from prompts to requests --------------------------------------------------------------------

    def _batch(self, prompts: Sequence[Prompt], params: Any) -> list[Request]:
        """The requests of several prompts. Whatever is wrong with parameters is said before a seed is drawn."""
        many = list(params) if isinstance(params, (list, tuple)) else [params] * len(prompts)
        if len(many) != len(prompts):
            raise ConfigError(f"{len(prompts)} prompts but {len(many)} SamplingParams: give one, or one per prompt")
        checked = [self._checked(one) for one in many]
        requests: list[Request] = []
        for prompt, one in zip(prompts, checked, strict=True):
            try:
                requests += self._requests(self._encode(prompt), one)
            except PromptError as error:
                requests += self._requests([], one, refused=cause_of(error))
        return requests

    def _samples(self, prompt: Prompt, params: SamplingParams | None) -> list[Request]:
        """The n requests of one prompt."""
        checked = self._checked(params)
        if _is_batch(prompt):
            raise ConfigError("this takes one prompt: use generate() for a list of them")
        return self._requests(self._encode(prompt), checked)

    def _checked(self, params: Any) -> SamplingParams:
        """The parameters, checked against what this cascade is."""
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise ConfigError(f"params must be SamplingParams, not {params!r:.60}")
        for name in params.levels or ():
            if name not in self.level_names:
                raise ConfigError(f"no level is named {name!r}.{did_you_mean(name, self.level_names)}")
        if params.stop and self._decode is None:
            raise ConfigError("stop strings need a tokenizer, and this target has none: use stop_token_ids")
        size = self.model.vocab_size
        bad = next((token for token in params.stop_token_ids if token >= size), None)
        if bad is not None:
            raise ConfigError(f"stop_token_ids must lie in [0, {size}), the target's vocabulary, not {bad}")
        whole_blocks = not rule_for(params, self.target.rule).lazy
        if whole_blocks and (own := [one for one in params.logits_processors if not for_drafts(one)]):
            raise ConfigError(
                f"the rule {self.config.rule} judges whole blocks, where {name_of(own[0])} needs one token after the "
                'other: use rule="coupled" or "rejection", or set its for_drafts=True if it keeps no state'
            )
        return params

    @property
    def _decode(self) -> Callable[[Sequence[int]], str] | None:
        return getattr(self.model, "decode", None) if getattr(self.model, "tokenizer", None) is not None else None

    def _requests(self, ids: list[int], params: SamplingParams, refused: str | None = None) -> list[Request]:
        """The n requests of one prompt; unseeded ones get fresh seeds."""
        limit = len(ids) + params.max_new_tokens
        if self.max_length is not None:
            limit = min(limit, self.max_length)
        ends = params.ends(self.model.end_ids)
        seed = params.seed
        if seed is None:
            seed = 0 if refused else self._seeds.getrandbits(64)
        samples: list[Request] = []
        for i in range(params.n):
            request = Request(next(self._ids), ids, params, sample_seed(seed, i), ends, limit, self._decode)
            request.parent, request.refused = samples[0] if samples else None, refused
            samples.append(request)
        return samples

    def _encode(self, prompt: Prompt) -> list[int]:
        """Ids of a prompt, checked. Raises PromptError."""
        own = getattr(self.model, "encode", None)
        ids = own(prompt) if own is not None else encode(None, prompt, self.target.name)
        if not ids:
            raise PromptError("the prompt is empty: give at least one token")
        check_ids("the prompt", ids, self.model.vocab_size, self.max_length)
        return ids

    def _warm_up(self) -> None:
        """Compiles what is compiled and times what is timed, so that no request pays for it."""
        warm_up_noise()
        warm_up_trees()
        for governor in self.chain.governors:
            getattr(governor.drafter, "warm_up", lambda: None)()
        self.target.warm_up()


def _is_batch(prompt: Prompt) -> bool:
    """A list of prompts, as opposed to one prompt that is a list of ids or of messages."""
    if not isinstance(prompt, (list, tuple)) or not prompt:
        return False
    first = prompt[0]
    return isinstance(first, (str, list, tuple)) or (isinstance(first, Mapping) and "messages" in first)
