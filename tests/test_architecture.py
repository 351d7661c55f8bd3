"""The rules of ARCHITECTURE.md that a machine can check."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cascade
from cascade.plugin_checks import HOOKS

ROOT = Path(__file__).parents[1]
FILES = sorted(path for package in ("cascade", "drafters") for path in (ROOT / package).rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
LIGHT = ["cascade", "cascade.builtin", "cascade.config", "cascade.draft", "cascade.drafter", "cascade.errors"]
LIGHT += ["cascade.hookspecs", "cascade.plugin_checks", "cascade.plugins", "drafters"]

each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def for_types_only(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def imports(tree, *, late=True):
    """Absolute names of the modules that a tree imports at run time; `late` ones, inside functions, too."""
    found, todo = set(), [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        elif for_types_only(node):
            todo += node.orelse
        elif late or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            todo += ast.iter_child_nodes(node)
    return found


def packages(tree):
    return {name.partition(".")[0] for name in imports(tree)}


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)


# -- who imports whom ------------------------------------------------------------------------------


@each_file
def test_only_model_py_imports_transformers(path):
    assert "transformers" not in packages(TREES[path]) or path == ROOT / "cascade" / "model.py"


@each_file
def test_cascade_knows_drafters_only_by_name(path):
    if path.parent.name != "drafters":
        assert "drafters" not in packages(TREES[path])
        strings = {node.value for node in ast.walk(TREES[path]) if isinstance(node, ast.Constant)}
        assert "drafters" not in strings or path == ROOT / "cascade" / "plugins.py"


@each_file
def test_drafters_see_only_what_any_plugin_sees(path):
    if path.parent.name == "drafters":
        allowed = ("cascade.config", "cascade.draft", "cascade.drafter", "cascade.errors", "cascade.hookspecs")
        ours = {name for name in imports(TREES[path]) if name.partition(".")[0] == "cascade"} - {"cascade"}
        assert [name for name in ours if not name.startswith(allowed)] == []


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_import_nothing_heavy(module):
    heavy = "{'torch', 'transformers', 'numba'}"
    done = run(f"import sys, {module}; sys.exit(', '.join({heavy} & sys.modules.keys()) or None)")
    assert done.returncode == 0, done.stderr


def test_importing_cascade_does_not_even_import_numpy():
    done = run("import sys, cascade; from cascade import hookimpl, CascadeConfig; sys.exit('numpy' in sys.modules)")
    assert done.returncode == 0, done.stderr


def test_listing_the_plugins_imports_nothing_heavy():
    code = "import sys; from cascade.plugins import create; create(entry_points=False).listing(); "
    assert run(code + "sys.exit('torch' in sys.modules)").returncode == 0


def test_no_module_imports_itself_in_a_circle():
    names = {module_name(path): imports(TREES[path], late=False) for path in FILES}
    graph = {name: {other for other in found if other in names and other != name} for name, found in names.items()}
    graph.pop("cascade")  # everything is below it, and it imports all of it late

    def visit(name, above):
        assert name not in above, " -> ".join([*above, name])
        for other in sorted(graph.get(name, ())):
            visit(other, [*above, name])
        graph[name] = set()  # seen: nothing below it leads back

    for name in sorted(graph):
        visit(name, [])


# -- the public names ------------------------------------------------------------------------------


def test_public_names_are_one_list():
    [block] = [node for node in TREES[ROOT / "cascade" / "__init__.py"].body if for_types_only(node)]
    shown = {alias.name: node.module for node in block.body for alias in node.names}
    assert shown == cascade._HOME
    assert {*cascade._HOME, "__version__"} == set(cascade.__all__)
    assert set(cascade.__all__) <= set(dir(cascade))


@pytest.mark.parametrize("name", cascade.__all__)
def test_every_public_name_is_there(name):
    assert getattr(cascade, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'cascade' has no attribute 'Engin'"):
        cascade.Engin  # noqa: B018


# -- size, chance, hooks ---------------------------------------------------------------------------


@each_file
def test_a_file_has_at_most_350_lines(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 350


@each_file
def test_chance_is_an_argument(path):
    """No generator that others share: random numbers come from a seed that somebody handed over."""
    shared = re.compile(r"(random|(np|numpy)\.random|torch\.random)\.\w+|torch\.(manual_seed|seed|initial_seed)")
    seeded = re.compile(r"random\.Random|(np|numpy)\.random\.(default_rng|Generator|Philox|SeedSequence)")
    used = {ast.unparse(node) for node in ast.walk(TREES[path]) if isinstance(node, ast.Attribute)}
    assert [name for name in used if shared.fullmatch(name) and not seeded.fullmatch(name)] == []


@each_file
def test_a_file_says_what_it_is_for(path):
    assert ast.get_docstring(TREES[path])


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_documented_and_tested(hook):
    tree = TREES[ROOT / "cascade" / "hookspecs.py"]
    [function] = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == hook]
    prose = ast.get_docstring(function)
    if "checked, like" not in prose:  # which refers to a hook where all of this is said
        assert "Called" in prose
        assert "None" in prose
        assert re.search("[Rr]ais(e|ing)", prose)
    assert hook in (ROOT / "tests" / "test_plugins.py").read_text(encoding="utf-8")


def test_there_are_no_other_hooks():
    assert set(HOOKS) == {
        "cascade_register_drafters",
        "cascade_register_rules",
        "cascade_register_controllers",
        "cascade_load_model",
        "cascade_make_observer",
        "cascade_add_commands",
    }
