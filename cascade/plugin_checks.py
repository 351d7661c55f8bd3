"""What makes a plugin a good one: the checks that `cascade.plugins` puts every plugin through."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast

import pluggy

from cascade import hookspecs
from cascade.errors import ConfigError, PluginError, cause_of, did_you_mean, one_line

DISTRIBUTION = "cascade-spec"

#: What can be registered: kind -> (hook, "module:Class" of the base class).
KINDS = {
    "drafter": ("cascade_register_drafters", "cascade.drafter:Drafter"),
    "rule": ("cascade_register_rules", "cascade.rules:Rule"),
    "controller": ("cascade_register_controllers", "cascade.control.base:Controller"),
}
REGISTERS = {hook for hook, _ in KINDS.values()}
HOOKS = {
    name: tuple(inspect.signature(hook).parameters)
    for name, hook in vars(hookspecs).items()
    if name.startswith("cascade_") and inspect.isfunction(hook)
}


@dataclass(frozen=True)
class Source:
    """Where a plugin came from: its name, its distribution (or "") and its module or file."""

    name: str
    distribution: str
    module: str

    def __str__(self) -> str:
        return f"plugin {self.name!r} ({self.distribution or self.module})"


@dataclass
class Entry:
    """A name that a plugin registered, and the class, or "module:Class", that it stands for."""

    kind: str
    name: str
    target: type | str
    source: Source

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r} of {self.source}"


class Manager(pluggy.PluginManager):
    """A plugin manager that knows our hooks.

    It takes every function named cascade_* for one, decorated or not: a forgotten `@hookimpl` would
    otherwise be a plugin that silently does nothing.
    """

    def __init__(self) -> None:
        super().__init__(hookspecs.PROJECT)
        self.add_hookspecs(hookspecs)

    def parse_hookimpl_opts(self, plugin: object, name: str) -> pluggy.HookimplOpts | None:
        """See pluggy; None means that the attribute is no hook."""
        opts = super().parse_hookimpl_opts(plugin, name)
        if opts is None and name.startswith("cascade_"):
            found = inspect.getattr_static(plugin, name, None)
            if inspect.isfunction(found.__func__ if isinstance(found, (staticmethod, classmethod)) else found):
                return cast(pluggy.HookimplOpts, {})  # pluggy fills in the defaults
        return opts


def registrations(plugin: object, source: Source) -> list[Entry]:
    """Checks a plugin's hooks and asks it what it registers. Raises PluginError."""
    trial = Manager()  # a plugin that fails half-way leaves only this one spoilt
    _check_hooks(plugin, source, trial)
    try:
        trial.register(plugin, source.name)
    except pluggy.PluginValidationError as error:
        raise PluginError(f"{source}: {one_line(error)}") from error
    entries: list[Entry] = []
    for kind, (hook, _) in KINDS.items():
        for impl in getattr(trial.hook, hook).get_hookimpls():
            try:
                names = impl.function()
            except (Exception, SystemExit) as error:
                raise PluginError(f"{source}: {hook} failed: {cause_of(error)}") from error
            if not isinstance(names, Mapping):
                raise PluginError(f"{source}: {hook} must return a mapping of names, not {type(names).__name__}")
            entries += [_entry(kind, name, target, source) for name, target in names.items()]
    return entries


def _entry(kind: str, name: Any, target: Any, source: Source) -> Entry:
    if not isinstance(name, str) or not name:
        raise PluginError(f"{source}: the name of a {kind} must be a non-empty string, not {name!r}")
    entry = Entry(kind, name, target, source)
    if not isinstance(target, str):
        checked(entry, target)
    elif not re.fullmatch(r"[\w.]+:[\w.]+", target):
        raise PluginError(f"{entry} must be a class or 'module:Class', not {target!r}")
    return entry


def _check_hooks(plugin: object, source: Source, manager: Manager) -> None:
    """Raises PluginError unless every hook of the plugin exists and takes what we pass."""
    found = False
    for attribute in dir(plugin):
        options = manager.parse_hookimpl_opts(plugin, attribute)
        if options is None:
            continue
        found, name = True, options.get("specname") or attribute
        if name not in HOOKS:
            if options.get("optionalhook"):
                continue
            raise PluginError(f"{source}: there is no hook {name!r}.{did_you_mean(name, HOOKS)}")
        if name in REGISTERS and (options.get("wrapper") or options.get("hookwrapper")):
            raise PluginError(f"{source}: {name} cannot be a wrapper: it returns a mapping of names")
        for parameter in inspect.signature(getattr(plugin, attribute)).parameters.values():
            if parameter.name not in HOOKS[name]:
                takes = ", ".join(HOOKS[name])
                raise PluginError(f"{source}: hook {name}({takes}) passes no {parameter.name!r}")
            if parameter.default is not parameter.empty:
                raise PluginError(
                    f"{source}: give parameter {parameter.name!r} of {name} no default: pluggy 1.6 would not pass it"
                )
    if not found:
        raise PluginError(f"{source} has no hooks: a plugin has functions such as {sorted(HOOKS)[-2]}")


def checked(entry: Entry, found: Any) -> type:
    """`found`, if it is a class of the right kind. Raises PluginError."""
    module, _, name = KINDS[entry.kind][1].partition(":")
    base = getattr(importlib.import_module(module), name)
    if not (inspect.isclass(found) and issubclass(found, base)):
        raise PluginError(f"{entry} must be a subclass of {module}.{name}, not {found!r}")
    return found


def check_options(what: str, cls: type, options: Mapping[str, Any]) -> None:
    """Raises ConfigError, with a suggestion, for an option that the constructor does not know."""
    parameters = inspect.signature(cls).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for option in options:
        if option not in known:
            hint = did_you_mean(option, known) if known else " It has none."
            raise ConfigError(f"{what} has no option {option!r}.{hint}")


def foreign(module: ModuleType) -> str:
    """What to say about a module that lies where ours should."""
    where = module.__file__ or ", ".join(module.__path__)
    return (
        f"the import name {module.__name__!r} belongs to {where}, which is not ours. {DISTRIBUTION} needs that name: "
        f"rename what is there, or uninstall it and then reinstall {DISTRIBUTION}"
    )


def codes_of(error: BaseException) -> Iterator[Any]:
    """The code objects that an exception passed through, outermost first."""
    trace = error.__traceback__
    while trace is not None:
        yield trace.tb_frame.f_code
        trace = trace.tb_next
