"""Asks every system every question, in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cascade.bench.peers import RECIPES, peers
from cascade.bench.questions import Question, prompt_for
from cascade.bench.sweep import sweep
from cascade.bench.systems import EngineSystem, PeerError, Rounds, Run, System, token_ids
from cascade.errors import PromptError

if TYPE_CHECKING:
    from cascade.bench.setup import Plan
    from cascade.config import LevelConfig, SamplingParams
    from cascade.engine import Engine

#: What `--against` can name.
AGAINST = ("plain", *RECIPES)
WARM_UP_TOKENS = 8
WAVES = 4  # in a batch's call, questions per place: as in serving, who is done makes room for the next


@dataclass(frozen=True)
class Group:
    """Questions that are answered in one call: one, or of one category as many as keep a batch full for a while.

    Attributes:
        id: unique within a bench; decides who begins.
        category: of all of them.
        questions: in the file's order.
    """

    id: int
    category: str
    questions: tuple[Question, ...]


def systems_of(plan: Plan, engine: Engine, rounds: Rounds) -> tuple[list[System], dict[str, str]]:
    """The systems that a plan asks for, in its order, and those that cannot be had, with the reason.

    Args:
        plan: what is asked.
        engine: of the plan's configuration.
        rounds: a plugin that is registered with the engine.
    """
    settings = {governor.name: _setting(governor.config) for governor in reversed(engine.chain.governors)}
    found: list[System] = [EngineSystem("cascade", "this configuration", settings, engine, rounds=rounds)]
    skipped: dict[str, str] = {}
    for name in plan.against:
        if name == "plain":
            found.append(
                EngineSystem(name, "this engine without speculation", {"speculate": False}, engine, speculate=False)
            )
        else:
            more, without = peers(engine, [name], plan.batch)
            found += more
            skipped.update(without)
    if plan.sweep:
        fixed, without = sweep(engine)
        found += fixed
        skipped.update(without)
    return found, skipped


def _setting(config: LevelConfig) -> str:
    """How a level below the target is controlled, in words."""
    return "off" if config.k == 0 else f"{config.controller}, K {config.k_min} to {config.k_max}"


def check_prompts(engine: Engine, questions: Sequence[Question]) -> None:
    """Raises PromptError for a question that the target cannot answer with at least one token."""
    for question in questions:
        length = len(token_ids(engine, prompt_for(engine, question)))
        if engine.max_length is not None and length >= engine.max_length:
            raise PromptError(
                f"question {question.id!r} of category {question.category!r} has {length} tokens, and the context "
                f"holds {engine.max_length}: shorten it, or leave it out"
            )


def groups(questions: Iterable[Question], batch: int, first: int = 0) -> list[Group]:
    """Questions by category, in order: one to a group, or with batches up to `WAVES` times a batch.

    Args:
        questions: in the file's order.
        batch: how many are decoded at a time.
        first: the id of the first group.
    """
    size = batch * WAVES if batch > 1 else 1
    members: list[list[Question]] = []
    open_: dict[str, list[Question]] = {}
    for question in questions:
        group = open_.get(question.category)
        if group is None or len(group) == size:
            group = open_[question.category] = []
            members.append(group)
        group.append(question)
    return [Group(first + i, group[0].category, tuple(group)) for i, group in enumerate(members)]


def warm_up(systems: Sequence[System], group: Group, params: SamplingParams) -> dict[str, str]:
    """Lets every system answer a few tokens, so that no first question pays for it; returns who failed, and why."""
    failed = {}
    short = replace(params, max_new_tokens=min(WARM_UP_TOKENS, params.max_new_tokens))
    for system in systems:
        try:
            system.run(group.questions, short)
        except PeerError as error:
            failed[system.name] = f"failed while it was warmed up: {error}"
    return failed


def order(count: int, turn: int) -> list[int]:
    """Who goes when, of `count` systems: over enough turns each follows every other equally often (Williams 1949).

    What ran before leaves caches and memory in a state of its own, so nobody may always follow the same one.
    """
    row = [(turn + (place + 1) // 2 * (1 if place % 2 else -1)) % count for place in range(count)]
    return row[::-1] if count % 2 and turn // count % 2 else row  # of an odd number, backwards as well


def measure(
    systems: Sequence[System],
    group: Group,
    params: SamplingParams,
    repeats: int,
    tell: Callable[[str], None] = lambda name: None,
) -> tuple[list[Run], dict[str, str]]:
    """Has a group answered by every system `repeats` times; returns the runs, and which systems failed.

    Who follows whom changes from group to group and from repeat to repeat. Of a system that fails no run of this group
    is kept: half of its figures would compare with nothing.

    Args:
        systems: that have not failed.
        group: the questions.
        params: how they are answered.
        repeats: how often.
        tell: called with a system's name before it begins.
    """
    runs: list[Run] = []
    failed: dict[str, str] = {}
    for repeat in range(repeats):
        for system in [systems[place] for place in order(len(systems), group.id + repeat)]:
            if system.name in failed:
                continue
            tell(system.name)
            try:
                answers = system.run(group.questions, params, detailed=repeat == 0)
            except PeerError as error:
                failed[system.name] = f"failed on question {group.questions[0].id}: {error}"
                continue
            runs += [_stamped(run, system.name, group, i, repeat) for i, run in enumerate(answers)]
    return [run for run in runs if run["system"] not in failed], failed


def _stamped(run: Run, system: str, group: Group, place: int, repeat: int) -> Run:
    """A run with what says whose it is, in front."""
    batch = None if run["batch"] is None else {"id": group.id, **run["batch"]}
    question = group.questions[place]
    head = {"system": system, "category": group.category, "question_id": question.id, "repeat": repeat}
    return {**head, **run, "batch": batch}
