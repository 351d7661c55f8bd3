"""The hooks a plugin may implement. This module is their documentation.

A plugin is a module, or an object, with functions of these names:

    from cascade import Drafter, hookimpl

    class MyDrafter(Drafter): ...

    @hookimpl
    def cascade_register_drafters():
        return {"mine": MyDrafter}

What holds for all of them:

- A function may leave out parameters it does not need, but must not give any a default: pluggy 1.6
  does not pass such a parameter and 1.7 does.
- A function whose name begins with `cascade_` is taken for a hook, with or without `@hookimpl`; one
  that is not listed here is refused, for it would never be called.
- The hooks build; the objects they return run. Inside a round no hook is called, so that none costs
  anything per token.
- Built-in drafters, rules and controllers go through these hooks too. They register first, and
  pluggy asks the last one first: where the first answer counts, a plugin comes before us.
- An exception is reported with the plugin's name, as described at `cascade.plugins.create`.

A distribution announces its plugin by an entry point of the group `cascade_spec.plugins`; see
`plugins/cascade-template` for a whole one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from cascade.control.base import Controller
    from cascade.drafter import Drafter
    from cascade.request import Request
    from cascade.rows import CausalModel
    from cascade.rules import Rule
    from cascade.trace import Observer

#: pluggy's name for this project; not "cascade", which others may use as well.
PROJECT = "cascade_spec"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def cascade_register_drafters() -> Mapping[str, type[Drafter] | str]:  # type: ignore[empty-body]
    """Names that `LevelConfig(drafter=...)` and `--level` may use.

    Called once per plugin, when the plugins are loaded. Returns name -> subclass of
    `cascade.Drafter`, or name -> "module:Class", which is imported when the name is first used: write
    that if your module imports anything heavy. A level's `options` reach the class's constructor as
    keyword arguments.

    None is an error: it is a forgotten `return`. Raising makes the plugin a failed one. A name that
    exists already is a `PluginError` that names both plugins.
    """


@hookspec
def cascade_register_rules() -> Mapping[str, type[Rule] | str]:  # type: ignore[empty-body]
    """Verification rules, for `CascadeConfig(rule=...)` and `--rule`.

    Called, and checked, like `cascade_register_drafters`. Returns name -> subclass of
    `cascade.rules.Rule`, or "module:Class". The class says whether it is `lossless`, which
    `cascade.testing.assert_lossless` proves or refutes; a rule that is not is for experiments, and the user is told.
    """


@hookspec
def cascade_register_controllers() -> Mapping[str, type[Controller] | str]:  # type: ignore[empty-body]
    """Policies that set the number of drafted tokens, for `LevelConfig(controller=...)`.

    Called, and checked, like `cascade_register_drafters`. Returns name -> subclass of
    `cascade.control.base.Controller`, or "module:Class".
    """


@hookspec(firstresult=True)
def cascade_load_model(ref: str, device: Any, dtype: Any) -> CausalModel | None:
    """A model from where transformers does not find it.

    Called once for every level with a `model=`, when an engine is built, with that level's model,
    device and dtype as the configuration has them. Returns an object like `cascade.rows.CausalModel`,
    or None to pass on to the next plugin and at last to the built-in loader.

    May raise `cascade.LoadError` with one line that says what to change; it ends the search. Any other
    exception becomes a `PluginError`.
    """


@hookspec
def cascade_make_observer(request: Request) -> Observer | None:
    """Something that wants to see the rounds of a request.

    Called once per request, before its first round. Returns an object like `cascade.trace.Observer`,
    whose `on_round` runs after every round and `on_end` after the last, or None if this request does
    not interest you: then its rounds cost nothing.

    May raise here, which is a `PluginError` and fails the request.
    """


@hookspec
def cascade_add_commands(subparsers: Any) -> None:
    """More commands for `cascade ...`.

    Called once, by the command line only, with the object that `argparse`'s `add_subparsers` returns:
    `subparsers.add_parser("mine").set_defaults(run=function)`, where `function(args)` returns the exit
    status. Returns None; anything else is not used.

    May raise: a `PluginError`. Since Python 3.11 taking the name of an existing command is one.
    """
