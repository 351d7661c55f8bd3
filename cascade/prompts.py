"""Prompts become ids and ids become text; and whether two models mean the same by an id."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from cascade.errors import LoadError, PromptError, first_line


def encode(tokenizer: Any, prompt: Any, name: str) -> list[int]:
    """The ids of a prompt: a str as it is, chat messages through the template, ids unchanged.

    Args:
        tokenizer: of the transformers kind, or None.
        prompt: str, ids, messages `[{"role": ..., "content": ...}]`, or a dict of "messages" and what else the
            template takes: "tools", "documents", or whatever it calls its own.
        name: how an error calls the model.

    Raises:
        PromptError: there is no tokenizer or chat template for it, or it is of another type.
    """
    options: dict[str, Any] = {}
    if isinstance(prompt, Mapping):
        options = dict(prompt)
        prompt = options.pop("messages", None)
        if not isinstance(prompt, (list, tuple)) or not prompt:
            raise PromptError('a prompt that is a dict needs "messages": a list of {"role": ..., "content": ...}')
    messages = isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)
    if not messages and not isinstance(prompt, str):
        return _ids(prompt)
    if tokenizer is None:
        raise PromptError(f"{name} has no tokenizer: give the prompt as token ids, or its level a tokenizer=...")
    if isinstance(prompt, str):
        try:
            return list(tokenizer(prompt)["input_ids"])
        except Exception as error:  # a lone surrogate, for example: not a text that can be encoded
            raise PromptError(f"the tokenizer of {name} refuses this text: {first_line(error)}") from error
    if not getattr(tokenizer, "chat_template", None):
        raise PromptError(f"the tokenizer of {name} has no chat template: give the prompt as a string")
    try:
        fixed = {"tokenize": True, "return_dict": False}
        found = tokenizer.apply_chat_template(list(prompt), **{"add_generation_prompt": True, **options, **fixed})
    except Exception as error:  # templates are programs that raise what they like
        raise PromptError(f"the chat template of {name} refuses these messages: {first_line(error)}") from error
    return [int(token) for token in found]


def _ids(prompt: Any) -> list[int]:
    plain = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    try:
        if not isinstance(plain, (list, tuple)):
            raise TypeError
        return [operator.index(token) for token in plain]
    except TypeError:
        raise PromptError(
            f"a prompt is a string, a list of token ids or chat messages, not {type(prompt).__name__}"
        ) from None


def same_tokenizer(one: Any, other: Any) -> None:
    """Checks that two models mean the same by every id; heads padded to other sizes are allowed.

    A model without a tokenizer is taken at its user's word.

    Raises:
        LoadError: names both models and the first id in which they differ.
    """
    mine, theirs = one.tokenizer, other.tokenizer
    if mine is None or theirs is None or mine is theirs:
        return
    first, second = _table(mine), _table(theirs)
    if first == second:
        return
    place = min(i for i in first.keys() | second.keys() if first.get(i) != second.get(i))
    raise LoadError(
        f"{one.name} and {other.name} have different tokenizers: id {place} is {_token(first, place)} in the one "
        f"and {_token(second, place)} in the other. Speculation needs models that share a tokenizer"
    )


def _table(tokenizer: Any) -> dict[int, str]:
    table = {index: token for token, index in tokenizer.get_vocab().items()}
    special = getattr(tokenizer, "all_special_tokens", ())  # some tokenizers keep these apart
    table.update({tokenizer.convert_tokens_to_ids(token): token for token in special})
    return table


def _token(table: Mapping[int, str], place: int) -> str:
    return repr(table[place]) if place in table else "unused"


def check_ids(what: str, ids: Sequence[int], vocab_size: int, max_length: int | None) -> None:
    """Raises PromptError unless all ids are in the vocabulary and the context holds them.

    Args:
        what: how the error calls them: "the prompt".
        ids: of the prompt.
        vocab_size: V; ids lie in [0, V).
        max_length: tokens that the context holds; None without a limit.
    """
    bad = next((token for token in ids if not 0 <= token < vocab_size), None)
    if bad is not None:
        raise PromptError(f"{what} has token id {bad}, outside the vocabulary of {vocab_size}")
    if max_length is not None and len(ids) > max_length:
        raise PromptError(f"{what} has {len(ids)} tokens, and the context holds {max_length}: shorten it")
