"""Processors, criteria and prompts of a request's own: the same under speculation as without it."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import transformers as hf

from cascade import CascadeConfig, ConfigError, Engine, LevelConfig, PromptError, SamplingParams
from cascade.rules import Coupled
from cascade.testing import FixedCosts, ScriptedDrafter, ToyModel
from tests.tiny import tiny, tokenizer

PROMPT = [1, 2, 3]
PARAMS = SamplingParams(max_new_tokens=30, temperature=0.8, seed=11)


class Counting:
    """Forces a token at every fifth call; a new request gets a new count."""

    def __init__(self) -> None:
        self.calls = 0

    def for_request(self) -> Counting:
        return Counting()

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls % 5 == 0:
            scores = torch.full_like(scores, -math.inf)
            scores[0, self.calls % 7] = 0
        return scores


class After:
    """Ends a text at its n-th token."""

    def __init__(self, n: int) -> None:
        self.n, self.seen = n, []

    def for_request(self) -> After:
        fresh = After(self.n)
        self.latest = fresh
        return fresh

    def __call__(self, ids: torch.Tensor, scores: object) -> bool:
        assert scores is None
        self.seen.append(ids[0].tolist())
        return len(self.seen) >= self.n


def engine(kind: str | None = None, text: list[int] | None = None, **options) -> Engine:
    levels = [ToyModel()]
    if kind:
        drafter = ScriptedDrafter([[*PROMPT, *(text or [])]], kind)
        levels.insert(0, LevelConfig(drafter=drafter, k=4, controller="fixed"))
    return Engine(CascadeConfig(levels, **options), costs=FixedCosts(lambda *_: 1.0), check=True)


@pytest.mark.parametrize("kind", ["oracle", "mixed", "wrong"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_processors_with_state_are_each_requests_own(kind: str, temperature: float) -> None:
    params = dataclasses.replace(PARAMS, temperature=temperature, logits_processors=[Counting()])
    want = engine().generate(PROMPT, params).tokens
    assert want[4::5] == [5, 3, 1, 6, 4, 2], "the fifth call, the tenth, ..."
    made = engine(kind, want)
    assert made.generate(PROMPT, params).tokens == want
    assert made.generate(PROMPT, params).tokens == want, "the same parameters again"
    assert [r.tokens for r in made.generate([PROMPT, PROMPT], params)] == [want, want]
    assert made.generate(PROMPT, dataclasses.replace(params, n=3))[0].tokens == want


@pytest.mark.parametrize("n", [1, 2, 3, 7, 30, 31])
@pytest.mark.parametrize("kind", [None, "oracle", "mixed"])
def test_criteria_are_asked_once_per_token_on_the_true_prefix(kind: str | None, n: int) -> None:
    free = engine().generate(PROMPT, PARAMS).tokens
    criterion = After(n)
    result = engine(kind, free).generate(PROMPT, dataclasses.replace(PARAMS, stopping_criteria=[criterion]))
    assert result.tokens == free[:n]
    assert result.finish_reason == ("stop" if n <= 30 else "length")
    assert criterion.latest.seen == [[*PROMPT, *free[: i + 1]] for i in range(len(result.tokens))]
    assert not criterion.seen


@pytest.mark.parametrize("kind", [None, "oracle", "mixed"])
def test_a_criterion_that_raises_fails_its_request_at_the_same_token(kind: str | None) -> None:
    def broken(ids: torch.Tensor, scores: object) -> bool:
        if ids.shape[1] == 9:
            raise ValueError("no more")
        return False

    free = engine().generate(PROMPT, PARAMS).tokens
    params = dataclasses.replace(PARAMS, stopping_criteria=[broken])
    results = engine(kind, free).generate([PROMPT, PROMPT], [params, PARAMS])
    assert (results[0].finish_reason, results[0].error) == ("error", "ValueError: no more")
    assert results[0].tokens == free[:6]
    assert results[1].tokens == free


def test_criteria_of_transformers() -> None:
    free = engine().generate(PROMPT, PARAMS).tokens
    for criterion, count in (
        (hf.MaxLengthCriteria(8), 5),
        (hf.EosTokenCriteria(free[3]), free.index(free[3]) + 1),
        (hf.MaxTimeCriteria(0.0), 1),
    ):
        params = dataclasses.replace(PARAMS, stopping_criteria=[criterion])
        assert engine("oracle", free).generate(PROMPT, params).tokens == free[:count]


# -- what draft models apply ---------------------------------------------------------------------------


def drafted(processors: list[object], draft: ToyModel | None = None) -> float | None:
    """How much of a draft model's text is accepted; it is the target, but for the processors."""
    levels = [
        LevelConfig(model=draft or ToyModel(), name="draft", k=4, controller="fixed"),
        LevelConfig(model=ToyModel(), name="target"),
    ]
    made = Engine(CascadeConfig(levels), costs=FixedCosts(lambda *_: 1.0), check=True)
    params = SamplingParams(max_new_tokens=60, logits_processors=processors)
    result = made.generate(PROMPT, params)
    assert result.tokens == engine().generate(PROMPT, params).tokens
    return result.stats.levels[0].alpha


def ban_even(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    scores = scores.clone()
    scores[:, ::2] = -math.inf
    return scores


def test_draft_models_apply_what_is_cheap_and_without_state() -> None:
    assert drafted([ban_even]) < 0.9
    promised = lambda ids, scores: ban_even(ids, scores)  # noqa: E731
    promised.for_drafts = True
    assert drafted([promised]) == 1.0
    known = [
        hf.SuppressTokensLogitsProcessor(range(0, 32, 2)),
        hf.NoRepeatNGramLogitsProcessor(2),
        hf.RepetitionPenaltyLogitsProcessor(1.5),
        hf.SequenceBiasLogitsProcessor([[[3], 1.5], [[5, 7], -9.0]]),
    ]
    assert drafted(known) == 1.0


def test_a_processor_that_does_not_fit_the_drafts_head_costs_nothing() -> None:
    bias = torch.randn(1, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    processor = lambda ids, scores: scores + bias  # noqa: E731
    processor.for_drafts = True
    narrow = ToyModel(vocab_size=31, order=1)
    narrow.tokenizer = object()  # of the target's vocabulary: its head alone is smaller
    assert drafted([processor], narrow) is not None
    assert drafted([hf.SequenceBiasLogitsProcessor([[[3], 1.5]])], narrow) is not None


def test_a_rule_that_needs_whole_blocks_refuses_processors_by_name() -> None:
    class Whole(Coupled):
        lazy = False

    made = engine("oracle")
    made.target.rule = Whole()
    assert made.generate(PROMPT, PARAMS).tokens
    with pytest.raises(ConfigError, match="Counting needs one token after the other"):
        made.generate(PROMPT, dataclasses.replace(PARAMS, logits_processors=[Counting()]))
    stopped = made.generate(PROMPT, dataclasses.replace(PARAMS, stopping_criteria=[After(3)]))
    assert len(stopped.tokens) == 3, "criteria are asked about what was accepted, in order"


@pytest.mark.parametrize("rule", ["block", "traversal"])
def test_whole_blocks_and_processors(rule: str) -> None:
    """What keeps no state can be asked about every node; a greedy text is walked token by token whatever the rule."""
    known = hf.SuppressTokensLogitsProcessor(range(0, 32, 2))
    levels = [LevelConfig(model=ToyModel(seed=5), k=3, controller="fixed", name="draft"), ToyModel()]
    made = Engine(CascadeConfig(levels, rule=rule), costs=FixedCosts(lambda *_: 1.0), check=True)
    odd = made.generate(PROMPT, dataclasses.replace(PARAMS, logits_processors=[known])).tokens
    assert all(token % 2 for token in odd)
    greedy = dataclasses.replace(PARAMS, temperature=0.0, logits_processors=[Counting()])
    assert made.generate(PROMPT, greedy).tokens == engine().generate(PROMPT, greedy).tokens
    with pytest.raises(ConfigError, match='use rule="coupled" or "rejection"'):
        made.generate(PROMPT, dataclasses.replace(PARAMS, logits_processors=[Counting()]))


# -- parameters and prompts ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stop": [""]}, "non-empty"),
        ({"stop": ["x"]}, "tokenizer"),
        ({"stop_token_ids": [32]}, r"\[0, 32\).*not 32"),
        ({"stopping_criteria": [5]}, "stopping_criteria: 5 cannot be called"),
        ({"stopping_criteria": 5}, "stopping_criteria must be a list, not 5"),
        ({"logits_processors": ["ban"]}, "logits_processors: 'ban' cannot be called"),
        (
            {"logits_processors": [ToyModel]},
            "logits_processors: ToyModel is a class: give an object",
        ),
        (
            {"logits_processors": [lambda ids: ids]},
            "logits_processors: <lambda> cannot be called",
        ),
        ({"temperature": -1}, "temperature must be a number >= 0, not -1"),
        ({"top_p": 0}, r"top_p must lie in \(0, 1\], not 0"),
        ({"min_new_tokens": 99}, r"min_new_tokens \(99\) must not exceed max_new_tokens \(30\)"),
    ],
)
def test_parameters_are_refused_before_any_work(changes: dict[str, object], words: str) -> None:
    made = engine("oracle")
    before = made.model.forwards
    with pytest.raises(ConfigError, match=words) as caught:
        made.generate([PROMPT, PROMPT], [PARAMS, dataclasses.replace(PARAMS, **changes)])
    assert "\n" not in str(caught.value)
    assert made.model.forwards == before
    assert not made.scheduler.live


def chat_engine() -> Engine:
    tok = tokenizer(259)
    tok.chat_template = (
        "{% if tools %}tools: {% for t in tools %}{{ t.function.name }} {% endfor %}\n{% endif %}"
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if mood %}({{ mood }}) {% endif %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    level = LevelConfig(model=tiny("llama", vocab_size=259), tokenizer=tok, name="target")
    return Engine(CascadeConfig([level]), costs=FixedCosts(lambda *_: 1.0))


def test_chat_prompts_with_tools_and_a_system_message() -> None:
    def weather(town: str) -> str:
        """
        The weather in a town.

        Args:
            town: its name
        """
        return town

    made, params = chat_engine(), SamplingParams(max_new_tokens=8)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Rain?"}]
    text = "tools: weather \nsystem: Be brief.\nuser: Rain?\n(calm) assistant: "
    want = made.generate(text, params).tokens
    prompt = {"messages": messages, "tools": [weather], "mood": "calm"}
    assert made.generate(prompt, params).tokens == want
    assert [r.tokens for r in made.generate([prompt, prompt], params)] == [want, want]
    open_end = {"messages": messages, "add_generation_prompt": False}
    assert made.generate(open_end, params).tokens == made.generate("system: Be brief.\nuser: Rain?\n", params).tokens
    made.close()


@pytest.mark.parametrize("prompt", [{}, {"messages": []}, {"messages": "hello"}, {"tools": []}])
def test_a_dict_without_messages_is_refused(prompt: dict[str, object]) -> None:
    made = chat_engine()
    with pytest.raises(PromptError, match='needs "messages"'):
        made.generate(prompt)
    made.close()
