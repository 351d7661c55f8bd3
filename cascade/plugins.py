"""Finds plugins, and asks them. There is no global manager: whoever needs one makes one."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import logging
import os
import re
import sys
from collections.abc import Collection
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import cascade
from cascade.errors import CascadeError, ConfigError, PluginError, cause_of, did_you_mean, one_line
from cascade.plugin_checks import (
    DISTRIBUTION,
    HOOKS,
    KINDS,
    REGISTERS,
    Entry,
    Manager,
    Source,
    check_options,
    checked,
    codes_of,
    foreign,
    registrations,
)

if TYPE_CHECKING:
    from cascade.control.base import Controller
    from cascade.drafter import Drafter
    from cascade.request import Request
    from cascade.rows import CausalModel
    from cascade.rules import Rule
    from cascade.trace import Observer

GROUP = "cascade_spec.plugins"
BLOCK_VARIABLE = "CASCADE_BLOCK_PLUGINS"
BUILTIN = ("cascade.builtin", "drafters")

log = logging.getLogger("cascade.plugins")


class Registered(NamedTuple):
    """One row of `cascade plugins`. `kind` is "drafter", "rule", "controller" or "hook"."""

    kind: str
    name: str
    plugin: str
    distribution: str
    module: str


class Plugins:
    """What is registered, by whom. Made by `create`.

    Attributes:
        failures: one line for each installed plugin that could not be used.
    """

    def __init__(self) -> None:
        self.failures: list[str] = []
        self._manager = Manager()
        self._sources: dict[str, Source] = {}
        self._entries: dict[tuple[str, str], Entry] = {}

    # -- what is registered --------------------------------------------------------------------------

    def drafter_names(self) -> list[str]:
        """The registered drafters, sorted."""
        return self.names("drafter")

    def names(self, kind: str) -> list[str]:
        """The names registered of one of `KINDS`, sorted."""
        return sorted(name for k, name in self._entries if k == kind)

    def listing(self) -> list[Registered]:
        """Everything registered, built-ins included, by kind and name; hooks last."""
        rows = []
        for entry in self._entries.values():
            target, source = entry.target, entry.source
            module = target.partition(":")[0] if isinstance(target, str) else target.__module__
            module = module if source.distribution else source.module  # of a one-file plugin: its path
            rows.append(Registered(entry.kind, entry.name, source.name, source.distribution, module))
        rows.sort(key=lambda row: ([*KINDS].index(row.kind), row.name))
        for hook in sorted(HOOKS.keys() - REGISTERS):
            for impl in getattr(self._manager.hook, hook).get_hookimpls():
                source = self._sources[impl.plugin_name]
                rows.append(Registered("hook", hook, source.name, source.distribution, source.module))
        return rows

    # -- by name -------------------------------------------------------------------------------------

    def drafter(self, name: str, /, **options: Any) -> Drafter:
        """A new drafter. Raises ConfigError for an unknown name or option, PluginError for a broken one."""
        cls = self._resolve("drafter", name)
        check_options(f"drafter {name!r}", cls, options)
        try:
            return cast("Drafter", cls(**options))
        except (ConfigError, TypeError, ValueError) as error:  # how constructors refuse their options
            raise ConfigError(f"drafter {name!r}: {one_line(error)}") from error
        except CascadeError:
            raise
        except Exception as error:
            raise PluginError(f"{self._entries['drafter', name]} cannot be made: {cause_of(error)}") from error

    def rule(self, name: str) -> type[Rule]:
        """The class of a verification rule."""
        return cast("type[Rule]", self._resolve("rule", name))

    def controller(self, name: str) -> type[Controller]:
        """The class of a controller."""
        return cast("type[Controller]", self._resolve("controller", name))

    def _resolve(self, kind: str, name: str) -> type:
        entry = self._entries.get((kind, name))
        if entry is None:
            failed = f" Plugins that failed: {'; '.join(self.failures)}" if self.failures else ""
            raise ConfigError(f"no {kind} is named {name!r}.{did_you_mean(name, self.names(kind))}{failed}")
        if isinstance(entry.target, str):
            entry.target = self._import(entry, entry.target)
        return entry.target

    def _import(self, entry: Entry, target: str) -> type:
        where, _, path = target.partition(":")
        plugin = self._manager.get_plugin(entry.source.name)
        try:
            # A one-file plugin may call itself by its file's name, under which nobody can import it.
            found: Any = plugin if where == entry.source.name and inspect.ismodule(plugin) else None
            found = importlib.import_module(where) if found is None else found
            for part in path.split("."):
                found = getattr(found, part)
        except (Exception, SystemExit) as error:
            raise PluginError(f"{entry}: {target!r} cannot be imported: {cause_of(error)}") from error
        return checked(entry, found)

    # -- the other hooks -----------------------------------------------------------------------------

    def load_model(self, ref: Any, device: Any, dtype: Any) -> CausalModel | None:
        """The first model that a plugin offers for `ref`, or None."""
        return cast("CausalModel | None", self._call("cascade_load_model", ref=ref, device=device, dtype=dtype))

    def observers(self, request: Request) -> tuple[Observer, ...]:
        """What plugins want to see this request's rounds; empty where none does."""
        return tuple(self._call("cascade_make_observer", request=request) or ())

    def add_commands(self, subparsers: Any) -> None:
        """Lets plugins add commands to the command line."""
        self._call("cascade_add_commands", subparsers=subparsers)

    def _call(self, hook: str, **arguments: Any) -> Any:
        caller = getattr(self._manager.hook, hook)
        try:
            return caller(**arguments)
        except CascadeError:
            raise
        except Exception as error:
            owners = {getattr(impl.function, "__code__", None): impl.plugin_name for impl in caller.get_hookimpls()}
            guilty = [self._sources[owners[code]] for code in codes_of(error) if code in owners]
            who = guilty[-1] if guilty else "a plugin"
            raise PluginError(f"{who}: {hook} failed: {cause_of(error)}") from error

    # -- registration --------------------------------------------------------------------------------

    def _add(self, plugin: object, source: Source) -> None:
        """Checks a plugin and registers it. Raises PluginError, and then nothing has changed."""
        if any(plugin is known for known in self._manager.get_plugins()):
            return
        if inspect.isclass(plugin):
            plugin = plugin()
        self._claim(plugin, source, registrations(plugin, source))

    def _claim(self, plugin: object, source: Source, entries: list[Entry]) -> None:
        for entry in entries:
            other = self._entries.get((entry.kind, entry.name))
            if other is not None:
                raise _NameTakenError(
                    f"{entry.kind} {entry.name!r} is registered twice: by {other.source} and by {source}. "
                    f"Rename one, or block a plugin: {BLOCK_VARIABLE}={source.name}"
                )
        self._manager.register(plugin, source.name)
        self._sources[source.name] = source
        self._entries.update({(entry.kind, entry.name): entry for entry in entries})

    def _add_builtin(self, name: str) -> None:
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            raise PluginError(f"{DISTRIBUTION} is installed incompletely: {cause_of(error)}") from error
        if not any(hook in vars(module) for hook in HOOKS):
            raise PluginError(foreign(module))
        self._add(module, Source(name, f"{DISTRIBUTION} {cascade.__version__}", name))

    def _add_installed(self, point: importlib.metadata.EntryPoint, blocked: Collection[str]) -> None:
        dist = point.dist
        source = Source(point.name, f"{dist.name} {dist.version}" if dist else "", point.value)
        if point.name in blocked or (dist is not None and dist.name in blocked):
            return
        if point.name in self._sources:  # two distributions may choose the same entry-point name
            source = Source(f"{point.name}@{dist.name if dist else point.value}", source.distribution, source.module)
        try:
            self._add(point.load(), source)
        except _NameTakenError:
            raise
        except (Exception, SystemExit) as error:
            cause = str(error) if isinstance(error, PluginError) else f"{source} cannot be imported: {cause_of(error)}"
            self.failures.append(cause)
            log.debug("%s", cause, exc_info=error)

    def _add_named(self, item: Any, blocked: Collection[str]) -> None:
        plugin, source = _load(item)
        if source.name in blocked:
            raise PluginError(f"{source} is both asked for and blocked, by `blocked` or {BLOCK_VARIABLE}: drop one")
        number, name = 2, source.name
        while source.name in self._sources:
            source = Source(f"{name}-{number}", source.distribution, source.module)
            number += 1
        try:
            self._add(plugin, source)
        except CascadeError:
            raise
        except (Exception, SystemExit) as error:
            raise PluginError(f"{source} cannot be used: {cause_of(error)}") from error


class _NameTakenError(PluginError):
    """Two plugins want one name. Neither of them can be preferred, so nothing goes on."""


def create(*extra: Any, entry_points: bool = True, blocked: Collection[str] = ()) -> Plugins:
    """A fresh set of plugins: the built-ins, then the installed ones, then `extra`.

    An installed plugin that fails is left out with one warning, and the others keep working; one in
    `extra` was asked for by its user, so it raises.

    Args:
        extra: modules, objects, paths of one-file plugins ("x.py") or dotted names of modules.
        entry_points: whether to look for installed plugins (entry-point group `cascade_spec.plugins`).
        blocked: names of plugins or of their distributions to leave out; the environment variable
            CASCADE_BLOCK_PLUGINS, names separated by commas, adds to them.

    Raises:
        PluginError: a plugin in `extra` fails, a name is registered twice, or another package has
            taken one of our import names.
    """
    named = [blocked] if isinstance(blocked, str) else blocked
    blocked = {*named, *re.split(r"[,\s]+", os.environ.get(BLOCK_VARIABLE, ""))}
    if not hasattr(cascade, "hookimpl"):  # another distribution has overwritten our __init__.py
        raise PluginError(foreign(cascade))
    plugins = Plugins()
    for name in BUILTIN:
        if name not in blocked:
            plugins._add_builtin(name)
    if entry_points:
        for point in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda point: point.name):
            plugins._add_installed(point, blocked)
    for item in extra:
        plugins._add_named(item, blocked)
    for failure in plugins.failures:
        log.warning("%s", failure)
    return plugins


# -- loading ---------------------------------------------------------------------------------------------


def _load(item: Any) -> tuple[object, Source]:
    """The plugin that an `extra` means. Raises PluginError."""
    if isinstance(item, (str, Path)):
        file = isinstance(item, Path) or item.endswith(".py") or os.sep in item
        source = Source(Path(item).stem if file else str(item), "", str(item))
        try:
            return (_run_file(Path(item)) if file else importlib.import_module(str(item))), source
        except PluginError:
            raise
        except (Exception, SystemExit) as error:
            raise PluginError(f"{source} cannot be imported: {cause_of(error)}") from error
    name = getattr(item, "__name__", None) or type(item).__name__
    return item, Source(name, "", item.__name__ if inspect.ismodule(item) else type(item).__module__)


def _run_file(path: Path) -> ModuleType:
    """Runs a one-file plugin, each time afresh, and returns its module."""
    if not path.is_file():
        raise PluginError(f"no plugin file {str(path)!r}")
    # Prefixed, so that a plugin called random.py cannot stand in for another module.
    spec = importlib.util.spec_from_file_location(f"cascade_plugin_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise PluginError(f"plugin file {str(path)!r} is no Python file: its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses and pickle look their module up there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module.__name__]
        raise
    return module
