"""The built-in drafters, registered as any plugin would register its own.

Use them by name, `LevelConfig(drafter="ngram")`; nobody needs to import this package.
"""

from __future__ import annotations

from cascade.hookspecs import hookimpl


@hookimpl
def cascade_register_drafters() -> dict[str, str]:
    """Drafters, imported when they are first used."""
    return {"ngram": "drafters.ngram:NgramDrafter"}
