"""`cascade generate`: one prompt through a cascade, text as it comes."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cascade.cli import INTERRUPTED, OK, levels
from cascade.cli.files import check_writable
from cascade.config import SamplingParams
from cascade.errors import DecodeError, PromptError

if TYPE_CHECKING:
    from rich.console import Console

    from cascade.cli.show import Painter
    from cascade.cli.stream import Capture
    from cascade.engine import Engine
    from cascade.result import Result


def add(subparsers: Any) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "generate", help="answer a prompt", description="Answers a prompt through a cascade."
    )
    parser.set_defaults(run=run)
    parser.add_argument("prompt", metavar="PROMPT", help="the prompt; - reads it from standard input, as it is")
    parser.add_argument("--chat", action="store_true", help="send the prompt as a user's message, by the chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object (per sample) instead of text")
    parser.add_argument("--trace", metavar="FILE.jsonl", help="write one line per round to this file")
    levels.add_arguments(parser)
    add_sampling(parser)
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends the text; may be repeated")
    parser.add_argument("--n", type=int, default=1, metavar="N", help="how many samples (default: 1)")
    parser.add_argument(
        "--no-speculate", action="store_true", help="plain decoding: the same text, from the target alone"
    )


def add_sampling(parser: argparse.ArgumentParser, max_new_tokens: int = 128) -> None:
    """The options that say how tokens are chosen."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy")
    group.add_argument("--top-k", type=int, default=0, metavar="N", help="only the N likeliest tokens (default: all)")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="only the likeliest tokens that make up P")
    group.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same text, whatever the levels")
    group.add_argument(
        "--max-new-tokens", type=int, default=max_new_tokens, metavar="N", help=f"at most N (default: {max_new_tokens})"
    )


def sampling(args: argparse.Namespace, **more: Any) -> SamplingParams:
    """What `add_sampling` asked for. Raises ConfigError."""
    return SamplingParams(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        **more,
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command: everything that can be refused is, before a model is loaded."""
    params = sampling(args, stop=args.stop, n=args.n, speculate=not args.no_speculate)
    prompt = _prompt(args)
    from cascade.cli.stream import Capture

    capture = Capture()
    trace = _trace(args.trace)
    config, plugins = levels.configured(args, capture, *trace)
    from cascade.cli import show
    from cascade.engine import Engine

    with contextlib.ExitStack() as stack:
        for plugin in trace:
            stack.callback(plugin.close)
        with show.loading(2 * len(config.levels)) as progress:
            engine = stack.enter_context(Engine(config, plugins=plugins, progress=progress))
        if args.json:
            return _json(engine, capture, prompt, params)
        return _text(engine, capture, prompt, params)


def _prompt(args: argparse.Namespace) -> Any:
    text = args.prompt
    if text == "-":
        try:
            text = sys.stdin.read()
        except UnicodeDecodeError as error:
            raise PromptError(f"standard input is not text: {error}") from None
    if not text:
        raise PromptError("the prompt is empty")
    return [{"role": "user", "content": text}] if args.chat else text


def _trace(file: str | None) -> tuple[Any, ...]:
    """The plugin that writes the trace, if one is asked for. Raises ConfigError where it could not."""
    if file is None:
        return ()
    path = check_writable("--trace", file)
    from cascade.trace import JsonTrace

    return (JsonTrace(path),)


def _json(engine: Engine, capture: Capture, prompt: Any, params: SamplingParams) -> int:
    results, status = _all(engine, capture, prompt, params)
    for result in results:
        record = {
            "tokens": result.tokens,
            "text": result.text,
            "finish_reason": result.finish_reason,
            "error": result.error,
            "origins": result.origins,
            "stats": result.stats.as_dict(),
        }
        print(json.dumps(record))
    return _checked(results, status)


def _text(engine: Engine, capture: Capture, prompt: Any, params: SamplingParams) -> int:
    from cascade.cli.show import console, summary

    screen, notes = console(), console(sys.stderr)
    if params.n == 1:
        results, status = _stream(engine, prompt, params, screen)
    else:
        results, status = _all(engine, capture, prompt, params)
        for i, result in enumerate(results):
            if screen.is_terminal:
                screen.print(f"sample {i + 1} of {params.n}", style="bold")
            elif i:
                print()
            _paint(engine, result, screen)
    sys.stdout.flush()
    for result in results:
        notes.print(summary(result), soft_wrap=True)
    return _checked(results, status)


def _stream(engine: Engine, prompt: Any, params: SamplingParams, screen: Console) -> tuple[list[Result], int]:
    """Shows one sample as it comes; an interruption keeps what there is."""
    paint, status = painter(engine, screen), OK
    stream = engine.stream(prompt, params)
    try:
        with contextlib.closing(stream):
            for chunk in stream:
                paint.chunk(chunk)
    except KeyboardInterrupt:
        status = INTERRUPTED
    results = [stream.result] if stream.result is not None else []
    for result in results:
        paint.text(result.text[paint.written :])  # what waited for the rest of a character or a stop string
    print()
    return results, status


def _all(engine: Engine, capture: Capture, prompt: Any, params: SamplingParams) -> tuple[list[Result], int]:
    """All samples at once, or what there is of them after an interruption."""
    try:
        results = engine.generate(prompt, params)
    except KeyboardInterrupt:
        return capture.take(), INTERRUPTED
    return (results if isinstance(results, list) else [results]), OK


def _paint(engine: Engine, result: Result, screen: Console) -> None:
    from cascade.result import Chunk

    painter(engine, screen).chunk(Chunk(result.text, tuple(result.tokens), tuple(result.origins)))
    print()


def painter(engine: Engine, screen: Console) -> Painter:
    """What shows this engine's chunks on a console."""
    from cascade.cli.show import Painter

    decode = getattr(engine.model, "decode", None)
    return Painter(screen, decode or (lambda ids: ""), len(engine.config.levels))


def _checked(results: Sequence[Result], status: int) -> int:
    """The status; raises DecodeError if a request failed."""
    for result in results:
        if result.error is not None:
            raise DecodeError(result.error)
    return status
