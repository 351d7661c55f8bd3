"""The errors a user can cause. Each carries one line that says what to change."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class CascadeError(Exception):
    """Base of every error that a user of cascade can cause."""


class ConfigError(CascadeError):
    """A configuration, a parameter or a command line that cannot be used."""


class PromptError(CascadeError):
    """A prompt that cannot be decoded: empty, too long, or with ids outside the vocabulary."""


class LoadError(CascadeError):
    """A model or tokenizer that cannot be loaded, or that cannot serve at its level."""


class PluginError(CascadeError):
    """A plugin that fails to import, has a misspelt hook or takes a name that exists."""


class DraftError(CascadeError):
    """A proposal that breaks the contract of `Draft`. It costs that proposal, never the request."""


class DecodeError(CascadeError):
    """A request that failed while it was decoded, for example on logits that are not numbers."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns " Did you mean 'x'?" for the closest of `known`, or what there is to choose from."""
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1)
    if close:
        return f" Did you mean {close[0]!r}?"
    return f" Known: {', '.join(names)}." if names else ""


# -- how errors speak of other things --------------------------------------------------------------------


def one_line(message: object) -> str:
    """A message, or that of an error, without line breaks."""
    return " ".join(str(message).split())


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def cause_of(error: BaseException) -> str:
    """Type and message of an error, in one line."""
    text = one_line(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def name_of(one: Any) -> str:
    """What a function, a class or an object is called."""
    return getattr(one, "__name__", None) or type(one).__name__
