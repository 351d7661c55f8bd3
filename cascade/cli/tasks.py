"""The demo's three tasks. Written for a small model: each asks for what it can do well."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """A prompt, what it stands for, and what ends its answer besides the model itself."""

    name: str
    about: str
    prompt: str
    stop: tuple[str, ...] = ()


_CODE = """\
class Account:
    def __init__(self, owner):
        self.owner = owner
        self.balance = 0

    def deposit(self, amount):
        self.balance = self.balance + amount
        return self.balance

    def withdraw(self, amount):
        if amount <= 0:
            raise ValueError("Insufficient funds")
        self.balance = self.balance - amount
        return self.balance
"""

_TEXT = """\
The town library of Marrow Bay opened in 1911 in a former net loft beside the harbour. Its first librarian, Ada Venn, \
carried the books from the ferry in a fish cart. In the winter of 1927 a storm flooded the ground floor, and the \
fishermen moved four thousand volumes to the church tower in a single night. Since then every new reader signs the \
Storm Register, a ledger bound in sailcloth. Today the library lends tools, seeds and musical instruments as well as \
books. It is open from Tuesday to Saturday, and on the first Friday of each month it stays open until midnight, when \
the harbour lamps are put out and someone reads aloud by candlelight. The library has no late fees. Instead, readers \
who are late bring a jar of jam for the winter fair, which pays for the roof."""

TASKS = (
    Task(
        "edit",
        "Edit a piece of code: rename the class to Wallet.",
        f"```python\n{_CODE}```\n\nRename the class to Wallet. Write out the whole class.",
        ("\n```",),  # what follows the code is chatter
    ),
    Task(
        "answer",
        "Answer from a given text: when is the library open, and what does it lend?",
        f"{_TEXT}\n\nWhen is the library open, and what does it lend?",
    ),
    Task(
        "write",
        "Write freely: a short story about a clockmaker.",
        "Write a short story about a clockmaker.",
    ),
)

#: Repeats itself, so that every level has something to do while it warms up.
WARM_UP = "one two three four, one two three four, one two three four, one two three"
