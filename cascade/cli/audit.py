"""`cascade audit`: replays questions without speculation and compares, token by token."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cascade.cli import FAILED, INTERRUPTED, OK, check_counts, levels
from cascade.cli.files import check_writable
from cascade.config import CascadeConfig, SamplingParams
from cascade.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from cascade.audit import Case
    from cascade.bench.questions import Question
    from cascade.cli.audit_store import Found
    from cascade.engine import Engine
    from cascade.plugins import Plugins

ALL = "all"


def add(subparsers: Any) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "audit",
        help="check that speculation changes no text",
        description="Decodes questions with speculation and without, and compares the tokens. Where they part, it "
        "says how close the choice was. Status 1 if anything differs that should not.",
        conflict_handler="resolve",  # --rule can be repeated here
    )
    parser.set_defaults(run=run)
    levels.add_arguments(parser)
    group = parser.add_argument_group("what is compared")
    group.add_argument(
        "--rule", action="append", default=[], metavar="NAME",
        help=f"a verification rule; may be repeated; {ALL} is every registered one (default: the config's, or coupled)",
    )  # fmt: skip
    group.add_argument("--questions", required=True, metavar="FILE.jsonl", help="Spec-Bench's or HumanEval's lines")
    group.add_argument("--limit-per-category", type=int, metavar="N", help="only the first N of each category")
    group.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="at most N each (default: 64)")
    group.add_argument(
        "--temperature", type=float, action="append", default=[], metavar="T",
        help="may be repeated (default: 0 and 1 for coupled, 0 for other rules)",
    )  # fmt: skip
    group.add_argument("--seeds", type=int, default=1, metavar="N", help="sampled with seeds 0 to N-1 (default: 1)")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="only the likeliest tokens that make up P")
    group.add_argument(
        "--threshold", type=float, metavar="NATS",
        help="where logits are not bit-exact, up to which distance of two tokens at temperature 1 they may change "
        "places (default: by the target's dtype)",
    )  # fmt: skip
    group.add_argument(
        "--json", metavar="OUT.json",
        help="write the cases to this file as well; given again after an interruption, the audit goes on",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Runs the command: everything that can be refused is, before a model is loaded."""
    _check(args)
    out = check_writable("--json", args.json) if args.json else None
    from cascade.bench.questions import read_questions
    from cascade.cli import show
    from cascade.cli.audit_store import Found
    from cascade.cli.environment import environment

    questions = read_questions(args.questions, args.limit_per_category)
    plans = _plans(args)
    screen = show.console()
    with Found(out, _configuration(args, plans), environment()) as found:
        try:
            for number, (rule, params) in enumerate(plans):
                if number:
                    screen.print()
                _audit_rule(args, rule, questions, params, found, screen)
        except KeyboardInterrupt:
            return _interrupted(found)
        found.finish()
        failed = any(case["verdict"] in ("defect", "error") for rule, _ in plans for case in found.cases(rule))
    return FAILED if failed else OK


def _interrupted(found: Found) -> int:
    count = sum(len(audit["cases"]) for audit in found.audits.values())
    kept = "nothing is kept"
    if found.partial is not None and count:
        kept = f"{_count(count, 'case')} kept in {found.partial}; the same command goes on from there"
    print(f"cascade: interrupted: {kept}", file=sys.stderr)
    return INTERRUPTED


# -- what is asked for -----------------------------------------------------------------------------------


def _check(args: argparse.Namespace) -> None:
    check_counts(args, "max_new_tokens", "seeds", "limit_per_category")
    if args.threshold is not None and not (args.threshold >= 0 and math.isfinite(args.threshold)):
        raise ConfigError(f"--threshold must be a number of at least 0, not {args.threshold}")


def _configured(args: argparse.Namespace, rule: str | None) -> tuple[CascadeConfig, Plugins]:
    return levels.configured(argparse.Namespace(**{**vars(args), "rule": rule}))


def _plans(args: argparse.Namespace) -> list[tuple[str, list[SamplingParams]]]:
    """Each rule with the parameters it is audited at. Raises ConfigError for a rule that cannot promise them."""
    config, plugins = _configured(args, None)
    names = list(dict.fromkeys(args.rule or [config.rule]))
    if ALL in names:
        names = plugins.names("rule")
    from cascade.audit import sampled_refusal
    from cascade.rules import Coupled

    plans = []
    for name in names:
        coupled = issubclass(plugins.rule(name), Coupled)
        temperatures = list(dict.fromkeys(args.temperature or ([0.0, 1.0] if coupled else [0.0])))
        if not coupled and any(temperatures):
            raise ConfigError(sampled_refusal(name))
        plans.append((name, [params for each in temperatures for params in _params(args, each)]))
    return plans


def _params(args: argparse.Namespace, temperature: float) -> list[SamplingParams]:
    """The parameters of one temperature, with every seed if it has any use for one."""
    seeds = range(args.seeds if temperature else 1)
    return [
        SamplingParams(max_new_tokens=args.max_new_tokens, temperature=temperature, top_p=args.top_p, seed=seed)
        for seed in seeds
    ]


def _configuration(args: argparse.Namespace, plans: Sequence[tuple[str, Sequence[SamplingParams]]]) -> dict[str, Any]:
    """What must be equal where a file is continued, as plain values."""
    from cascade.bench.setup import Plan

    config, plugins = _configured(args, None)
    files = [Path(file) for file in (args.config, *args.early_plugin, *args.plugin) if file]
    plan = Plan(config, Path(args.questions), SamplingParams(max_new_tokens=args.max_new_tokens), (), files=files)
    settings = {rule: [[each.temperature, each.top_p, each.seed] for each in params] for rule, params in plans}
    return {**plan.configuration(plugins.drafter_names()), "rules": settings, "threshold": args.threshold}


# -- one rule --------------------------------------------------------------------------------------------


def _audit_rule(
    args: argparse.Namespace,
    rule: str,
    questions: Sequence[Question],
    params: Sequence[SamplingParams],
    found: Found,
    screen: Console,
) -> None:
    """Audits one rule, says what it finds, and keeps it question by question."""
    from cascade.audit import audit, threshold_of
    from cascade.bench.questions import prompt_for
    from cascade.bench.runner import check_prompts
    from cascade.cli import show
    from cascade.engine import Engine

    missing = [question for question in questions if question.key not in found.done(rule)]
    if missing:
        # From the start again: a drafter object of a config file serves one engine.
        config, plugins = _configured(args, rule)
        with contextlib.ExitStack() as stack:
            with show.loading(2 * len(config.levels)) as progress:
                engine = stack.enter_context(Engine(config, plugins=plugins, progress=progress))
            check_prompts(engine, questions)
            limit = threshold_of(engine.model) if args.threshold is None else args.threshold
            found.begin(rule, _about(engine, limit, params[0].max_new_tokens))
            screen.print(_introduction(found.audits[rule], engine.model.exactness), soft_wrap=True)
            if done := found.done(rule):
                screen.print(f"going on: {_count(len(done), 'question')} compared before", soft_wrap=True)
            report = stack.enter_context(_reporter(screen, rule, len(missing) * len(params)))
            for question in missing:
                cases = audit(engine, [prompt_for(engine, question)], params, limit, partial(report, question))
                found.append(rule, [_record(question, case) for case in cases])
    screen.print(_conclusion(found.audits[rule], _asked(found.cases(rule), questions)), soft_wrap=True)


def _asked(cases: Sequence[dict[str, Any]], questions: Sequence[Question]) -> list[dict[str, Any]]:
    """The cases of these questions: a file may hold more of them."""
    keys = {question.key for question in questions}
    return [case for case in cases if (case["category"], case["question_id"]) in keys]


def _about(engine: Engine, limit: float, max_new_tokens: int) -> dict[str, Any]:
    """Under what a rule is audited."""
    from cascade.audit import bit_exact

    exact = bit_exact(engine.model)
    return {
        "lossless": engine.target.rule.lossless,
        "summary": engine.summary(),
        "dtype": engine.model.dtype,
        "bit_exact": exact,
        "width": getattr(getattr(engine.model, "probed", None), "width", None),
        "threshold": None if exact else limit,
        "max_new_tokens": max_new_tokens,
    }


def _record(question: Question, case: Case) -> dict[str, Any]:
    record = case.as_dict()
    del record["prompt"]
    return {"category": question.category, "question_id": question.id, **record}


@contextlib.contextmanager
def _reporter(screen: Console, rule: str, total: int) -> Iterator[Callable[[Question, Case], None]]:
    """What to call with each case. A pipe gets a line for each, a terminal a bar and what is not identical."""
    if not screen.is_terminal:
        yield lambda question, case: screen.print(_line(question, rule, case), soft_wrap=True)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("auditing"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen, transient=True) as bar:
        task = bar.add_task("", total=total)

        def show_case(question: Question, case: Case) -> None:
            if case.verdict != "identical":
                style = "red" if case.failed else "yellow"
                screen.print(_line(question, rule, case), style=style, soft_wrap=True)
            bar.advance(task)

        yield show_case


# -- in words --------------------------------------------------------------------------------------------


def _introduction(about: dict[str, Any], exactness: str) -> str:
    if about["bit_exact"]:
        return f"rule {about['rule']}; the target is bit-exact: any difference is a defect"
    return (
        f"rule {about['rule']}; the target is not bit-exact ({exactness}): a difference is a "
        f"near-tie where the two tokens are at most {about['threshold']:.2g} nats apart at temperature 1, else a defect"
    )


def _line(question: Question, rule: str, case: Case) -> str:
    """One case in a line."""
    how = _setting(case.params.temperature) + (f" seed {case.params.seed}" if case.params.temperature else "")
    line = f"{question.category} {question.id}, {rule}, {how}: {_verdict(case)}"
    if case.error is not None:
        return f"{line}: {case.error}"
    if case.divergence is None:
        return f"{line}, {_count(case.new_tokens, 'token')}"
    found = case.divergence
    if found.token is None and found.plain_token is None:
        return f"{line} at the end: {case.finish_reason!r}, plain decoding {case.plain_finish_reason!r}"
    line += f" at token {found.position}: {_token(found.token, found.text)}"
    line += f", plain decoding {_token(found.plain_token, found.plain_text)}"
    if found.gap is not None:
        line += f"; top-2 gap {found.gap:.3g} nats"
    if found.behind is not None and found.behind != found.gap:
        line += f", the other token {found.behind:.3g} behind"
    return line


def _verdict(case: Case) -> str:
    verdict = "not lossless: not judged" if case.verdict == "not judged" else case.verdict
    return verdict.upper() if case.failed else verdict


def _token(token: int | None, text: str) -> str:
    if token is None:
        return "nothing"
    return f"{text!r} (id {token})" if text else f"id {token}"


def _setting(temperature: float) -> str:
    return f"temperature {temperature:g}" if temperature else "greedy"


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" + ("" if n == 1 else "s")


def _conclusion(about: dict[str, Any], cases: Sequence[dict[str, Any]]) -> str:
    """What was found, and under which conditions."""
    verdicts = [case["verdict"] for case in cases]
    settings = " and ".join(dict.fromkeys(_setting(case["temperature"]) for case in cases))
    exact = "bit-exact" + f" from width {about['width']}" * bool(about["width"])
    line = (
        f"{verdicts.count('identical')} of {len(cases)} identical (rule {about['rule']}, target {about['dtype']}, "
        f"{exact if about['bit_exact'] else 'not bit-exact'}; up to {_count(about['max_new_tokens'], 'token')}, "
        f"{settings})"
    )
    for verdict in ("near-tie", "defect", "error"):
        if verdict in verdicts:
            line += f", {_count(verdicts.count(verdict), verdict)}"
    if "not judged" in verdicts:
        line += f", {verdicts.count('not judged')} not judged, since the rule is not lossless"
    tokens, drafted = sum(case["new_tokens"] for case in cases), sum(case["drafted"] for case in cases)
    if not drafted:
        return f"{line}. No level below the target proposed a token that held, so this audit shows little."
    return f"{line}. {drafted} of {_count(tokens, 'token')} came from below the target."
