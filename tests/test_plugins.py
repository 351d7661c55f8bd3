import argparse
import logging
import sys
import textwrap
import types
from importlib import metadata

import pytest

import cascade
from cascade import CascadeError, ConfigError, Draft, Drafter, LoadError, PluginError, hookimpl, plugins
from cascade.control.base import Controller
from cascade.plugins import create
from cascade.rules import Rule

OURS = f"cascade-spec {cascade.__version__}"
VERSION = "1.2.dev3"  # of the fake distributions; nothing else has it


class Mine(Drafter):
    def __init__(self, width=3, fail=None):
        if fail is not None:
            raise fail
        self.width = width

    def propose(self, asks):
        return [Draft([1] * self.width) for _ in asks]


class NoOptions(Drafter):
    pass


class MyRule(Rule):
    pass


class MyController(Controller):
    pass


def module(name="my_plugin", **functions):
    """A plugin module with these hooks."""
    made = types.ModuleType(name)
    for hook, function in functions.items():
        function.__name__ = hook
        setattr(made, hook, hookimpl(function))
    return made


def registering(name="my_plugin", **names):
    return module(name, cascade_register_drafters=lambda: names)


def refusal(make, kind=PluginError):
    with pytest.raises(kind) as caught:
        make()
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture
def alone():
    """Plugins without whatever is installed here."""
    return lambda *extra, **options: create(*extra, entry_points=False, **options)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """install("dist-name", {"entry": "module"}, module="source") leaves what pip would leave behind."""
    modules = []

    def install(dist, points, **sources):
        folder = tmp_path / f"{dist.replace('-', '_')}-{VERSION}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: {VERSION}\n")
        lines = "".join(f"{name} = {value}\n" for name, value in points.items())
        (folder / "entry_points.txt").write_text(f"[cascade_spec.plugins]\n{lines}")
        for name, source in sources.items():
            modules.append(name)
            (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        monkeypatch.syspath_prepend(tmp_path)

    # Whatever else a developer has installed is not part of these tests.
    real = metadata.entry_points
    monkeypatch.setattr(metadata, "entry_points", lambda **kw: [p for p in real(**kw) if p.dist.version == VERSION])
    yield install
    for name in modules:
        sys.modules.pop(name, None)


def drafter_module(name, cls="Theirs"):
    """The source of a plugin that registers one drafter."""
    return f"""
        from cascade import Draft, Drafter, hookimpl

        class {cls}(Drafter):
            def propose(self, asks):
                return [Draft([7]) for _ in asks]

        @hookimpl
        def cascade_register_drafters():
            return {{"{name}": {cls}}}
    """


# -- built-ins -------------------------------------------------------------------------------------


def test_the_built_in_names_resolve(alone):
    found = alone()
    assert found.drafter_names() == ["ngram"]
    assert isinstance(found.drafter("ngram"), Drafter)
    assert {"coupled"} <= set(found.names("rule"))
    assert {"fixed", "pid"} <= set(found.names("controller"))
    assert all(issubclass(found.rule(name), Rule) for name in found.names("rule"))
    assert all(issubclass(found.controller(name), Controller) for name in found.names("controller"))


def test_built_ins_come_through_the_same_door(alone):
    rows = {(row.kind, row.name): row for row in alone().listing()}
    assert rows["drafter", "ngram"] == ("drafter", "ngram", "drafters", OURS, "drafters.ngram")
    assert rows["rule", "coupled"] == ("rule", "coupled", "cascade.builtin", OURS, "cascade.rules")
    assert alone(blocked=["drafters"]).drafter_names() == []


def test_two_managers_share_nothing(alone):
    with_mine, without = alone(registering(mine=Mine)), alone()
    assert "mine" in with_mine.drafter_names()
    assert "mine" not in without.drafter_names()


# -- the three doors -------------------------------------------------------------------------------


def test_a_module_object(alone):
    assert alone(registering(mine=Mine)).drafter("mine").width == 3


def test_an_object_with_hooks_as_methods(alone):
    class Plugin:
        def __init__(self, width):
            self.width = width

        @hookimpl
        def cascade_register_drafters(self):
            return {f"mine{self.width}": Mine}

    found = alone(Plugin(1), Plugin(2))
    assert found.drafter_names() == ["mine1", "mine2", "ngram"]
    assert [row.plugin for row in found.listing() if row.name.startswith("mine")] == ["Plugin", "Plugin-2"]


def test_a_class_is_taken_for_an_object_of_it(alone):
    class Plugin:
        def cascade_register_drafters(self):
            return {"mine": Mine}

    assert alone(Plugin).drafter("mine").width == 3


@pytest.mark.parametrize("kind", [str, lambda path: path], ids=["str", "Path"])
def test_a_file(alone, tmp_path, kind):
    file = tmp_path / "my_file.py"
    file.write_text(textwrap.dedent(drafter_module("mine")))
    found = alone(kind(file))
    assert isinstance(found.drafter("mine"), Drafter)
    [row] = [row for row in found.listing() if row.name == "mine"]
    assert row == ("drafter", "mine", "my_file", "", str(file))


def test_a_file_may_name_its_own_classes_by_string_and_use_dataclasses(alone, tmp_path):
    file = tmp_path / "random.py"  # must not stand in for the real one
    file.write_text(
        textwrap.dedent("""
            from __future__ import annotations
            from dataclasses import dataclass
            from cascade import Drafter

            @dataclass
            class Mine(Drafter):
                width: int = 5

            def cascade_register_drafters():
                return {"mine": "random:Mine"}
        """)
    )
    assert alone(file).drafter("mine", width=6).width == 6
    import random

    assert hasattr(random, "getrandbits")


def test_a_dotted_name(alone, tmp_path, monkeypatch):
    package = tmp_path / "some_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "inner.py").write_text(textwrap.dedent(drafter_module("mine")))
    monkeypatch.syspath_prepend(tmp_path)
    assert "mine" in alone("some_package.inner").drafter_names()


def test_an_installed_distribution(install):
    install("their-dist", {"theirs": "their_module"}, their_module=drafter_module("their-drafter"))
    found = create()
    assert isinstance(found.drafter("their-drafter"), Drafter)
    [row] = [row for row in found.listing() if row.name == "their-drafter"]
    assert row == ("drafter", "their-drafter", "theirs", f"their-dist {VERSION}", "their_module")
    assert found.failures == []
    assert "their-drafter" not in create(entry_points=False).drafter_names()


def test_an_installed_plugin_named_again_is_registered_once(install):
    install("their-dist", {"theirs": "their_module"}, their_module=drafter_module("their-drafter"))
    assert create("their_module").drafter_names().count("their-drafter") == 1


def test_two_distributions_may_choose_the_same_entry_point_name(install):
    install("dist-a", {"same": "module_a"}, module_a=drafter_module("a"))
    install("dist-b", {"same": "module_b"}, module_b=drafter_module("b"))
    found = create()
    assert {"a", "b"} <= set(found.drafter_names())
    assert len({row.plugin for row in found.listing() if row.name in ("a", "b")}) == 2


def test_nothing_is_imported_before_its_name_is_used(install):
    source = "def cascade_register_drafters(): return {'late': 'heavy_module:Late'}\n"
    heavy = "from cascade import Drafter\nclass Late(Drafter): pass\n"
    install("late-dist", {"late": "late_module"}, late_module=source, heavy_module=heavy)
    found = create()
    assert "late" in found.drafter_names()
    assert "heavy_module" not in sys.modules
    assert type(found.drafter("late")).__name__ == "Late"
    assert "heavy_module" in sys.modules


# -- failing plugins -------------------------------------------------------------------------------

BROKEN = {
    "import": ("import no_such_module_anywhere", "ModuleNotFoundError: No module named 'no_such_module_anywhere'"),
    "raises": ("raise ValueError('two\\nlines')", "ValueError: two lines"),
    "syntax": ("def", "SyntaxError"),
    "exits": ("raise SystemExit(3)", "SystemExit: 3"),
    "hook raises": ("def cascade_register_rules(): 1 / 0", "cascade_register_rules failed: ZeroDivisionError"),
    "misspelt": ("def cascade_register_drafter(): return {}", "Did you mean 'cascade_register_drafters'?"),
    "no hooks": ("x = 1", "has no hooks"),
}


@pytest.mark.parametrize(("source", "cause"), BROKEN.values(), ids=BROKEN)
def test_a_failing_installed_plugin_gives_one_message_and_the_others_work(install, caplog, source, cause):
    install("bad-dist", {"bad": "bad_module"}, bad_module=source)
    install("good-dist", {"good": "good_module"}, good_module=drafter_module("good"))
    with caplog.at_level(logging.WARNING):
        found = create()
    assert "good" in found.drafter_names()
    [failure] = found.failures
    assert [record.getMessage() for record in caplog.records] == [failure]
    assert failure.startswith(f"plugin 'bad' (bad-dist {VERSION})")
    assert cause in failure
    assert "\n" not in failure


def test_an_installed_plugin_whose_module_is_gone(install):
    install("bad-dist", {"bad": "gone_module"})
    [failure] = create().failures
    assert failure == (
        f"plugin 'bad' (bad-dist {VERSION}) cannot be imported: ModuleNotFoundError: No module named 'gone_module'"
    )


@pytest.mark.parametrize(("source", "cause"), BROKEN.values(), ids=BROKEN)
def test_a_failing_plugin_that_was_asked_for_is_an_error(alone, tmp_path, source, cause):
    file = tmp_path / "bad.py"
    file.write_text(source)
    message = refusal(lambda: alone(file))
    assert message.startswith(f"plugin 'bad' ({file})")
    assert cause in message


def test_a_file_that_fails_leaves_no_half_module_behind(alone, tmp_path):
    (tmp_path / "half.py").write_text("x = 1\nraise ValueError('boom')\n")
    refusal(lambda: alone(tmp_path / "half.py"))
    assert "cascade_plugin_half" not in sys.modules


def test_a_failed_plugin_asked_for_by_name_is_only_an_error(install, caplog):
    install("bad-dist", {"bad": "bad_module"}, bad_module="raise ValueError('boom')")
    assert "'bad_module'" in refusal(lambda: create("bad_module"))
    assert caplog.records == []


def test_an_unknown_name_recalls_the_plugins_that_failed(install):
    install("bad-dist", {"bad": "bad_module"}, bad_module="raise ValueError('boom')")
    message = refusal(lambda: create().drafter("bad"), ConfigError)
    assert message.startswith("no drafter is named 'bad'.")
    assert f"Plugins that failed: plugin 'bad' (bad-dist {VERSION}) cannot be imported: ValueError: boom" in message


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("no_such_file.py", "no plugin file 'no_such_file.py'"),
        ("some/folder/", "no plugin file 'some/folder'"),
        ("no_such_module", "plugin 'no_such_module' (no_such_module) cannot be imported: ModuleNotFoundError"),
        ("no..module", "cannot be imported"),
        (3, "plugin 'int' (builtins) has no hooks"),
        (None, "plugin 'NoneType' (builtins) has no hooks"),
        (Mine, "has no hooks"),
    ],
    ids=str,
)
def test_what_is_no_plugin(alone, item, message):
    assert message in refusal(lambda: alone(item))


def test_a_file_that_is_no_python(alone, tmp_path):
    (tmp_path / "notes.txt").touch()
    assert "must end in .py" in refusal(lambda: alone(tmp_path / "notes.txt"))


# -- names that clash ------------------------------------------------------------------------------


def test_two_plugins_with_one_name_are_an_error_that_names_both(alone):
    message = refusal(lambda: alone(registering("one", mine=Mine), registering("two", mine=NoOptions)))
    assert message.startswith("drafter 'mine' is registered twice: by plugin 'one' (one) and by plugin 'two' (two)")


def test_nor_may_a_plugin_take_a_built_in_s_name(alone):
    message = refusal(lambda: alone(registering(ngram=Mine)))
    assert f"plugin 'drafters' ({OURS})" in message
    assert "plugin 'my_plugin'" in message
    assert alone(registering(ngram=Mine), blocked=["drafters"]).drafter("ngram").width == 3


def test_a_clash_of_installed_plugins_says_how_to_go_on(install):
    install("dist-a", {"a": "module_a"}, module_a=drafter_module("same"))
    install("dist-b", {"b": "module_b"}, module_b=drafter_module("same"))
    message = refusal(create)
    assert f"plugin 'a' (dist-a {VERSION})" in message
    assert f"plugin 'b' (dist-b {VERSION})" in message
    assert message.endswith("CASCADE_BLOCK_PLUGINS=b")
    assert "same" in create(blocked=["b"]).drafter_names()


def test_a_drafter_and_a_rule_may_share_a_name(alone):
    both = module(
        cascade_register_drafters=lambda: {"mine": Mine},
        cascade_register_rules=lambda: {"mine": MyRule},
    )
    assert alone(both).rule("mine") is MyRule


# -- blocking --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["theirs", "their-dist"])
@pytest.mark.parametrize("how", ["argument", "environment"])
def test_blocked_plugins_are_not_even_imported(install, monkeypatch, name, how):
    install("their-dist", {"theirs": "their_module"}, their_module=drafter_module("their-drafter"))
    if how == "environment":
        monkeypatch.setenv("CASCADE_BLOCK_PLUGINS", f"something, {name}")
    found = create(blocked=[name] if how == "argument" else [])
    assert "their-drafter" not in found.drafter_names()
    assert "their_module" not in sys.modules
    assert found.failures == []


def test_one_blocked_name_may_be_a_plain_string(alone):
    assert alone(blocked="drafters").drafter_names() == []


def test_a_plugin_both_asked_for_and_blocked(alone):
    message = refusal(lambda: alone(registering(mine=Mine), blocked=["my_plugin"]))
    assert "both asked for and blocked" in message


# -- hooks that are not ours -----------------------------------------------------------------------


def test_a_misspelt_hook_is_an_error_with_a_suggestion(alone):
    message = refusal(lambda: alone(module(cascade_regster_drafters=lambda: {})))
    assert message == (
        "plugin 'my_plugin' (my_plugin): there is no hook 'cascade_regster_drafters'. "
        "Did you mean 'cascade_register_drafters'?"
    )


def test_an_undecorated_hook_is_a_hook(alone):
    plain = types.ModuleType("plain")
    plain.cascade_register_drafters = lambda: {"mine": Mine}
    assert "mine" in alone(plain).drafter_names()
    plain.cascade_make_observers = lambda request: None
    assert "Did you mean 'cascade_make_observer'?" in refusal(lambda: alone(plain))


def test_a_hook_for_a_newer_version_may_be_optional(alone):
    future = registering(mine=Mine)
    future.cascade_from_the_future = hookimpl(optionalhook=True)(lambda: None)
    assert "mine" in alone(future).drafter_names()


def test_a_misspelt_parameter_is_an_error_in_one_line(alone):
    message = refusal(lambda: alone(module(cascade_make_observer=lambda reqest: None)))
    assert message == "plugin 'my_plugin' (my_plugin): hook cascade_make_observer(request) passes no 'reqest'"


def test_a_parameter_with_a_default_is_refused(alone):
    message = refusal(lambda: alone(module(cascade_load_model=lambda ref, device="cpu": None)))
    assert "give parameter 'device' of cascade_load_model no default" in message


def test_parameters_may_be_left_out(alone):
    assert alone(module(cascade_load_model=lambda dtype: f"model in {dtype}")).load_model("x", "cpu", "int8") == (
        "model in int8"
    )


def test_a_register_hook_cannot_be_a_wrapper(alone):
    plugin = types.ModuleType("my_plugin")
    plugin.cascade_register_drafters = hookimpl(wrapper=True)(lambda: (yield))
    assert "cannot be a wrapper" in refusal(lambda: alone(plugin))


def test_what_only_pluggy_refuses_is_one_line_too(alone):
    plugin = types.ModuleType("my_plugin")
    plugin.cascade_make_observer = hookimpl(wrapper=True)(lambda request: None)  # a wrapper must yield
    assert refusal(lambda: alone(plugin)).startswith("plugin 'my_plugin' (my_plugin): ")


def test_hooks_may_be_found_under_another_function_name(alone):
    plugin = types.ModuleType("my_plugin")
    plugin.anything = hookimpl(specname="cascade_register_drafters")(lambda: {"mine": Mine})
    assert "mine" in alone(plugin).drafter_names()


# -- registering nonsense --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (None, "cascade_register_drafters must return a mapping of names, not NoneType"),
        (["mine"], "must return a mapping of names, not list"),
        ({3: Mine}, "the name of a drafter must be a non-empty string, not 3"),
        ({"": Mine}, "the name of a drafter must be a non-empty string, not ''"),
        ({"mine": Mine()}, "drafter 'mine' of plugin 'my_plugin' (my_plugin) must be a subclass of"),
        ({"mine": dict}, "must be a subclass of cascade.drafter.Drafter, not <class 'dict'>"),
        ({"mine": "just.a.module"}, "must be a class or 'module:Class', not 'just.a.module'"),
        ({"mine": "module:"}, "must be a class or 'module:Class'"),
    ],
    ids=["None", "list", "number", "empty", "object", "other class", "no class", "empty class"],
)
def test_a_drafter_of_the_wrong_type_is_refused_at_once(alone, names, message):
    assert message in refusal(lambda: alone(module(cascade_register_drafters=lambda: names)))


@pytest.mark.parametrize(
    ("hook", "kind", "base"),
    [
        ("cascade_register_rules", "rule", "cascade.rules.Rule"),
        ("cascade_register_controllers", "controller", "cascade.control.base.Controller"),
    ],
)
def test_rules_and_controllers_are_checked_too(alone, hook, kind, base):
    message = refusal(lambda: alone(module(**{hook: lambda: {"mine": Mine}})))
    assert f"{kind} 'mine' of plugin 'my_plugin' (my_plugin) must be a subclass of {base}" in message
    good = MyRule if kind == "rule" else MyController
    found = alone(module(**{hook: lambda: {"mine": good}}))
    assert getattr(found, kind)("mine") is good


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no_such_module:Mine", "'no_such_module:Mine' cannot be imported: ModuleNotFoundError"),
        ("cascade.drafter:Nothing", "'cascade.drafter:Nothing' cannot be imported: AttributeError"),
        ("cascade.rules:Rule", "must be a subclass of cascade.drafter.Drafter"),
    ],
)
def test_a_late_class_of_the_wrong_type_is_refused_when_it_is_used(alone, target, message):
    found = alone(registering(mine=target))
    text = refusal(lambda: found.drafter("mine"))
    assert text.startswith("drafter 'mine' of plugin 'my_plugin' (my_plugin)")
    assert message in text


# -- asking by name --------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "typo", "meant"), [("drafter", "ngarm", "ngram"), ("rule", "couple", "coupled")])
def test_an_unknown_name_is_refused_with_a_suggestion(alone, kind, typo, meant):
    assert refusal(lambda: getattr(alone(), kind)(typo), ConfigError) == (
        f"no {kind} is named {typo!r}. Did you mean {meant!r}?"
    )


def test_a_name_like_no_other_is_refused_with_the_list(alone):
    message = refusal(lambda: alone().controller("zzz"), ConfigError)
    assert "Known: " in message
    assert "fixed" in message
    assert "pid" in message


def test_options_reach_the_constructor_and_each_call_makes_a_new_one(alone):
    found = alone(registering(mine=Mine))
    assert found.drafter("mine", width=9).width == 9
    assert found.drafter("mine") is not found.drafter("mine")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mine", {"widht": 4}, "drafter 'mine' has no option 'widht'. Did you mean 'width'?"),
        ("none", {"width": 4}, "drafter 'none' has no option 'width'. It has none."),
        ("mine", {"fail": ValueError("width must\nbe small")}, "drafter 'mine': width must be small"),
        ("mine", {"fail": TypeError("no number")}, "drafter 'mine': no number"),
        ("mine", {"fail": ConfigError("too wide")}, "drafter 'mine': too wide"),
        ("needs", {}, "drafter 'needs': "),
    ],
)
def test_bad_options_are_one_line_that_names_the_drafter(alone, name, options, message):
    class Needs(Drafter):
        def __init__(self, path):
            self.path = path

    found = alone(registering(mine=Mine, none=NoOptions, needs=Needs))
    assert refusal(lambda: found.drafter(name, **options), ConfigError).startswith(message)


def test_a_constructor_with_keywords_takes_any_option(alone):
    class Takes(Drafter):
        def __init__(self, **options):
            self.options = options

    assert alone(registering(mine=Takes)).drafter("mine", anything=1).options == {"anything": 1}


def test_a_drafter_that_cannot_be_made_for_other_reasons(alone):
    found = alone(registering(mine=Mine))
    message = refusal(lambda: found.drafter("mine", fail=OSError("disk")))
    assert message == "drafter 'mine' of plugin 'my_plugin' (my_plugin) cannot be made: OSError: disk"
    assert refusal(lambda: found.drafter("mine", fail=LoadError("no weights")), LoadError) == "no weights"


# -- the other hooks -------------------------------------------------------------------------------


def test_load_model_takes_the_first_answer_the_latest_plugin_first(alone):
    def loader(name, known):
        return module(
            name, cascade_load_model=lambda ref, device, dtype: (name, device, dtype) if ref in known else None
        )

    found = alone(loader("one", "ab"), loader("two", "bc"))
    assert found.load_model("a", "cpu", "float32") == ("one", "cpu", "float32")
    assert found.load_model("b", None, None) == ("two", None, None)
    assert found.load_model("z", None, None) is None
    assert alone().load_model("a", None, None) is None


def test_observers_are_what_plugins_return_for_a_request(alone):
    one = module("one", cascade_make_observer=lambda request: f"one of {request}")
    none = module("none", cascade_make_observer=lambda request: None)
    assert alone(one, none).observers("r") == ("one of r",)
    assert alone().observers("r") == ()


def test_commands_of_plugins_work(alone):
    def add(subparsers):
        subparsers.add_parser("hello").set_defaults(run=lambda args: 7)

    parser = argparse.ArgumentParser()
    alone(module(cascade_add_commands=add)).add_commands(parser.add_subparsers())
    args = parser.parse_args(["hello"])
    assert args.run(args) == 7


@pytest.mark.parametrize(
    ("hook", "ask"),
    [
        ("cascade_load_model", lambda found: found.load_model("ref", None, None)),
        ("cascade_make_observer", lambda found: found.observers("request")),
        ("cascade_add_commands", lambda found: found.add_commands(None)),
    ],
)
def test_a_hook_that_raises_is_reported_with_its_plugin(alone, hook, ask):
    def fails():
        raise ValueError("two\nlines")

    innocent = module("innocent", **{hook: lambda: None})
    found = alone(innocent, module("guilty", **{hook: fails}), innocent)
    assert refusal(lambda: ask(found)) == f"plugin 'guilty' (guilty): {hook} failed: ValueError: two lines"


def test_an_error_in_the_user_s_words_passes_as_it_is(alone):
    def refuses(ref):
        raise LoadError(f"{ref} needs a password")

    found = alone(module(cascade_load_model=refuses))
    assert refusal(lambda: found.load_model("m", None, None), LoadError) == "m needs a password"


def test_listing_shows_who_implements_which_hook(alone):
    rows = alone(module(cascade_make_observer=lambda request: None)).listing()
    assert rows[-1] == ("hook", "cascade_make_observer", "my_plugin", "", "my_plugin")
    kinds = [row.kind for row in rows]
    assert kinds == sorted(kinds, key=["drafter", "rule", "controller", "hook"].index)


# -- our import names ------------------------------------------------------------------------------


def test_a_foreign_drafters_is_named(alone, monkeypatch):
    foreign = types.ModuleType("drafters")
    foreign.__file__ = "/elsewhere/drafters/__init__.py"
    monkeypatch.setitem(sys.modules, "drafters", foreign)
    message = refusal(alone)
    assert message.startswith(
        "the import name 'drafters' belongs to /elsewhere/drafters/__init__.py, which is not ours"
    )


def test_a_folder_called_drafters_is_named(alone, monkeypatch, tmp_path):
    (tmp_path / "drafters").mkdir()
    monkeypatch.delitem(sys.modules, "drafters", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sys, "meta_path", [finder for finder in sys.meta_path if "editable" not in str(finder)])
    assert str(tmp_path / "drafters") in refusal(alone)


def test_missing_drafters_are_an_incomplete_installation(alone, monkeypatch):
    monkeypatch.setitem(sys.modules, "drafters", None)
    assert refusal(alone).startswith("cascade-spec is installed incompletely: ")


def test_a_foreign_cascade_is_named(alone, monkeypatch):
    foreign = types.ModuleType("cascade")
    foreign.__file__ = "/elsewhere/cascade/__init__.py"
    monkeypatch.setattr(plugins, "cascade", foreign)
    assert "the import name 'cascade' belongs to /elsewhere/cascade/__init__.py" in refusal(alone)


def test_the_packages_belong_to_our_distribution_alone():
    owners = metadata.packages_distributions()
    for name in ("cascade", "drafters"):
        assert set(owners.get(name, ["cascade-spec"])) == {"cascade-spec"}


def test_every_failure_is_a_cascade_error():
    assert issubclass(PluginError, CascadeError)
    assert issubclass(ConfigError, CascadeError)
