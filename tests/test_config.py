import dataclasses
import math

import pytest

from cascade import (
    BypassConfig,
    CascadeConfig,
    CascadeError,
    ConfigError,
    Engine,
    LevelConfig,
    SamplingParams,
    load_config,
)
from cascade.config import DTYPES, normalise_levels
from cascade.testing import FixedCosts, ToyModel


def refusal(make):
    """The message of the ConfigError that `make` raises: one line, always."""
    with pytest.raises(ConfigError) as caught:
        make()
    message = str(caught.value)
    assert "\n" not in message
    assert isinstance(caught.value, CascadeError)
    return message


# -- unknown fields --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "typo", "meant"),
    [
        (lambda **kw: SamplingParams(**kw), "max_new_token", "max_new_tokens"),
        (lambda **kw: LevelConfig(drafter="ngram", **kw), "dtpye", "dtype"),
        (lambda **kw: CascadeConfig(levels=["m"], **kw), "rules", "rule"),
        (lambda **kw: BypassConfig(**kw), "treshold", "threshold"),
    ],
)
def test_an_unknown_field_is_refused_with_a_suggestion(make, typo, meant):
    message = refusal(lambda: make(**{typo: 1}))
    assert repr(typo) in message
    assert f"Did you mean {meant!r}?" in message


def test_a_field_like_no_other_is_refused_with_the_list():
    message = refusal(lambda: BypassConfig(zzz=1))
    assert "BypassConfig has no field 'zzz'. Known: gain, min_tests, " in message


def test_a_missing_or_surplus_argument_is_refused():
    assert refusal(lambda: CascadeConfig()) == "CascadeConfig: missing a required argument: 'levels'"
    assert refusal(lambda: BypassConfig(*range(9))) == "BypassConfig: too many positional arguments"


@pytest.mark.parametrize(
    "config",
    [SamplingParams(), LevelConfig(drafter="ngram"), CascadeConfig(levels=["m"]), BypassConfig()],
    ids=lambda config: type(config).__name__,
)
def test_configs_are_frozen_and_can_be_replaced(config):
    name = dataclasses.fields(config)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config, name, 1)
    assert dataclasses.replace(config) == config


# -- bounds ----------------------------------------------------------------------------------------

NAN, INF = math.nan, math.inf
BAD_PARAMS = {
    "max_new_tokens": [-1, 1.5, "8", None, True],
    "min_new_tokens": [-1, 0.5, 129],
    "temperature": [-0.1, NAN, INF, "hot", None, True],
    "top_k": [-1, 1.0, None],
    "top_p": [0, -1, 1.01, NAN, "1"],
    "min_p": [-0.1, 1.1, NAN],
    "repetition_penalty": [0, -1, NAN, INF],
    "seed": ["7", 1.5, True],
    "n": [0, -1, 1.0],
    "stop": ["", [""], [3], 5],
    "stop_token_ids": [[-1], ["a"], [1.0], 7],
    "logprobs": [-1, 1.5, True],
    "logits_processors": [[3], ["f"], 3],
    "bypass_threshold": [-0.1, 1.1, NAN, "low"],
    "levels": [3, [3]],
    "speculate": [None, "no"],
    "ignore_eos": [None, 1],
}
GOOD_PARAMS = {
    "max_new_tokens": [0, 1, 100_000],
    "min_new_tokens": [0, 128],
    "temperature": [0, 0.0, 1e-6, 3],
    "top_k": [0, 1, 10**6],
    "top_p": [1, 1.0, 1e-9],
    "min_p": [0, 1],
    "repetition_penalty": [0.5, 1, 2.0],
    "seed": [None, 0, -1, 2**70],
    "n": [1, 16],
    "logprobs": [None, 0, 5],
    "bypass_threshold": [None, 0, 1],
    "speculate": [True, False],
}


def cases(table):
    return [pytest.param(name, value, id=f"{name}={value!r}") for name, values in table.items() for value in values]


@pytest.mark.parametrize(("name", "value"), cases(BAD_PARAMS))
def test_sampling_params_refuse(name, value):
    assert name.removesuffix("_token_ids") in refusal(lambda: SamplingParams(**{name: value}))


@pytest.mark.parametrize(("name", "value"), cases(GOOD_PARAMS))
def test_sampling_params_accept(name, value):
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_none_means_no_stops_and_all_levels():
    params = SamplingParams(stop=None, stop_token_ids=None, logits_processors=None, levels=None)
    assert params == SamplingParams()
    assert (params.stop, params.levels) == ((), None)


def test_min_new_tokens_must_not_exceed_max():
    assert refusal(lambda: SamplingParams(max_new_tokens=3, min_new_tokens=4)) == (
        "min_new_tokens (4) must not exceed max_new_tokens (3)"
    )


def test_one_stop_string_and_one_level_name_are_lists_of_one():
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(levels="ngram").levels == ("ngram",)
    assert SamplingParams(levels=[]).levels == ()
    assert SamplingParams(stop=["a", "b"], levels=["x"], stop_token_ids=[1]).stop_token_ids == (1,)


@pytest.mark.parametrize(
    ("name", "value"),
    cases(
        {
            "threshold": [-0.1, 1.1, NAN, "low"],
            "min_tests": [0, 1.5],
            "probe_every": [0, None],
            "probe_max": [0, -3],
            "gain": ["yes"],
        }
    ),
)
def test_bypass_refuses(name, value):
    assert name in refusal(lambda: BypassConfig(**{name: value}))


def test_a_threshold_that_the_user_sets_is_obeyed_alone():
    assert (BypassConfig().threshold, BypassConfig().gain) == (0.3, True)
    assert (BypassConfig(threshold=0.3).threshold, BypassConfig(threshold=0.3).gain) == (0.3, False)
    assert BypassConfig(threshold=0.5, gain=True).gain is True
    assert BypassConfig(threshold=0).threshold == 0


def test_probe_every_must_not_exceed_probe_max():
    assert refusal(lambda: BypassConfig(probe_every=64, probe_max=32)) == (
        "bypass probe_every (64) must not exceed probe_max (32)"
    )


@pytest.mark.parametrize("level", [{}, {"drafter": "ngram", "model": "m"}], ids=["neither", "both"])
def test_a_level_is_a_drafter_or_a_model(level):
    assert "exactly one of drafter=... and model=..." in refusal(lambda: LevelConfig(**level))


@pytest.mark.parametrize(
    ("name", "value"),
    cases(
        {
            "k": [-1, 17, 1.5, "8", True],
            "k_min": [-1, 1.5, 17],
            "k_max": [-1, 0, "16"],
            "bypass": [0.3],
            "controller": [3, None, ""],
            "name": [3, ""],
            "options": [["setpoint"], {3: 4}],
        }
    ),
)
def test_a_level_refuses(name, value):
    assert name in refusal(lambda: LevelConfig(drafter="ngram", **{name: value}))


def test_k_zero_switches_a_level_off():
    assert LevelConfig(drafter="ngram", k=0).k == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_by_name_and_as_torch_prints_them(dtype):
    assert LevelConfig(model="m", dtype=dtype).dtype == dtype
    assert LevelConfig(model="m", dtype=f"torch.{dtype}").dtype == dtype


def test_an_unknown_dtype_is_refused_with_a_suggestion():
    assert refusal(lambda: LevelConfig(model="m", dtype="bfloat61")) == (
        "unknown dtype 'bfloat61'. Did you mean 'bfloat16'?"
    )


@pytest.mark.parametrize(
    ("name", "value"),
    cases(
        {
            "levels": ["ngram", None, 3, (), []],
            "rule": [None, 3, ""],
            "max_batch": [0, 1.5, None],
            "max_length": [1, 0, "512"],
            "seed": ["7", 1.5],
            "bypass": [0.3, None],
        }
    ),
)
def test_a_cascade_refuses(name, value):
    message = refusal(lambda: CascadeConfig(**{"levels": ["m"], name: value}))
    assert name in message


def test_one_plugin_is_a_list_of_one(tmp_path):
    for plugin in ("my_plugin.py", tmp_path / "my_plugin.py", math):
        assert CascadeConfig(levels=["m"], plugins=plugin).plugins == (plugin,)
    assert CascadeConfig(levels=["m"], plugins=["a", "b"]).plugins == ("a", "b")


# -- levels ----------------------------------------------------------------------------------------


class Model:
    """Stands for a transformers model."""


class Proposes:
    """Stands for a Drafter."""

    def propose(self, asks):
        return []


def names(*levels, drafters=("ngram",)):
    return [level.name for level in normalise_levels(CascadeConfig(levels=levels), drafters)]


def test_bare_strings_and_objects_become_levels():
    drafter, model = Proposes(), Model()
    levels = normalise_levels(CascadeConfig(levels=["ngram", drafter, "org/small", model]), ["ngram"])
    assert [level.drafter for level in levels] == ["ngram", drafter, None, None]
    assert [level.model for level in levels] == [None, None, "org/small", model]
    assert [level.name for level in levels] == ["ngram", "Proposes", "small", "Model"]


def test_a_string_that_is_no_drafter_is_a_model():
    [level] = normalise_levels(CascadeConfig(levels=["ngram"]), [])
    assert (level.model, level.drafter) == ("ngram", None)


def test_names_come_from_the_last_part_of_the_path():
    assert names("Qwen/Qwen2.5-Coder-0.5B-Instruct") == ["Qwen2.5-Coder-0.5B-Instruct"]
    assert names("/models/tiny.Q8_0.gguf") == ["tiny.Q8_0"]
    assert names(LevelConfig(drafter=["ngram", Proposes()]), "m") == ["ngram+Proposes", "m"]
    assert names(LevelConfig(model="self", dtype="int8"), "m") == ["self-int8", "m"]


def test_names_are_made_unique():
    assert names("ngram", "ngram", "a/m", "b/m", "m") == ["ngram", "ngram-2", "m", "m-2", "m-3"]


def test_a_made_name_never_takes_a_given_one():
    assert names(LevelConfig(model="a/m"), LevelConfig(model="b/x", name="m")) == ["m-2", "m"]
    assert names("m", "m", LevelConfig(model="m", name="m-2")) == ["m", "m-3", "m-2"]


def test_two_given_names_alike_are_refused():
    twice = LevelConfig(model="m", name="x")
    assert refusal(lambda: names(twice, twice)) == "two levels are named 'x': give each its own name"


def test_a_cascade_needs_a_target():
    assert "needs a target" in refusal(lambda: names("ngram"))
    assert "cannot be the target itself" in refusal(lambda: names("ngram", LevelConfig(model="self", dtype="int8")))
    assert "needs a target" in refusal(lambda: CascadeConfig(levels=[]))


# -- config files ----------------------------------------------------------------------------------


@pytest.fixture
def write(tmp_path):
    def write(text):
        file = tmp_path / "my_cascade.py"
        file.write_text(text)
        return file

    return write


def test_load_config_returns_the_file_s_config(write):
    file = write("from cascade import CascadeConfig\nconfig = CascadeConfig(levels=['ngram', 'm'], seed=3)\n")
    assert load_config(file) == load_config(str(file)) == CascadeConfig(levels=["ngram", "m"], seed=3)


def test_a_drafter_of_the_config_file_works_after_the_file_is_done(write):
    text = """
from cascade import CascadeConfig, Draft, Drafter

ANSWER = 42

class Mine(Drafter):
    def propose(self, asks):
        return [Draft([ANSWER]) for _ in asks]

config = CascadeConfig(levels=[Mine(), "m"])
"""
    drafter = load_config(write(text)).levels[0]
    assert [list(draft.tokens) for draft in drafter.propose([None])] == [[42]]


def test_a_config_file_that_raises_names_the_file_and_the_line(write):
    file = write("import math\n\nconfig = math.sqrt(-1)\n")
    assert refusal(lambda: load_config(file)).startswith(f"{file}:3: ValueError: ")


def test_the_line_is_the_file_s_own_not_that_of_what_it_calls(write):
    file = write("import json\n\ndef f():\n    return json.loads('{')\n\nconfig = f()\n")
    assert refusal(lambda: load_config(file)).startswith(f"{file}:4: JSONDecodeError: ")


def test_a_config_file_with_a_syntax_error_names_the_line(write):
    file = write("x = 1\nconfig = (\n")
    assert refusal(lambda: load_config(file)).startswith(f"{file}:2: SyntaxError: ")


def test_a_config_file_that_exits_or_raises_many_lines_is_one_line(write):
    assert "SystemExit" in refusal(lambda: load_config(write("raise SystemExit(3)\n")))
    assert "ValueError: a b" in refusal(lambda: load_config(write("raise ValueError('a\\nb')\n")))


def test_our_own_refusal_in_a_config_file_names_the_file_and_the_line(write):
    file = write("from cascade import CascadeConfig\n\nconfig = CascadeConfig(levels=[], seed=3)\n")
    assert refusal(lambda: load_config(file)).startswith(f"{file}:3: a cascade needs a target")


def test_a_config_file_without_a_config_is_refused(write):
    assert "must assign a CascadeConfig to the name 'config'" in refusal(lambda: load_config(write("cfg = 1\n")))
    assert "must assign a CascadeConfig" in refusal(lambda: load_config(write("config = ['m']\n")))


def test_a_missing_config_file_is_refused(tmp_path):
    assert refusal(lambda: load_config(tmp_path / "none.py")) == f"no config file {str(tmp_path / 'none.py')!r}"
    assert "no config file" in refusal(lambda: load_config(tmp_path))


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        ({}, "Dynamic"),
        ({"tree": "chain"}, None),
        ({"tree": (2, 1)}, "Fixed"),
        ({"controller": "fixed", "k": 3}, None),
        ({"controller": "fixed", "k": 3, "tree": "dynamic"}, "Dynamic"),
        ({"k_min": 2}, None),
    ],
)
def test_trees_are_the_default_where_something_weighs_them(options: dict[str, object], shape: str | None) -> None:
    levels = [LevelConfig(model=ToyModel(), name="draft", **options), LevelConfig(model=ToyModel(), name="target")]
    level = Engine(CascadeConfig(levels), costs=FixedCosts(lambda *_: 1.0)).target.source.drafter
    assert (None if level.shape is None else type(level.shape).__name__) == shape


@pytest.mark.parametrize(("draft", "target"), [(False, True), (True, False)])
def test_models_without_trees_stay_chains_and_say_so(draft: bool, target: bool) -> None:
    lower, upper = ToyModel(seed=1), ToyModel()
    lower.trees, upper.trees = draft, target
    levels = [LevelConfig(model=lower, name="draft", tree="dynamic"), LevelConfig(model=upper, name="target")]
    engine = Engine(CascadeConfig(levels), costs=FixedCosts(lambda *_: 1.0))
    assert engine.target.source.drafter.shape is None
    assert "level draft drafts chains: it or what verifies it cannot do trees" in engine.summary()


@pytest.mark.parametrize(
    ("level", "words"),
    [
        (LevelConfig(drafter="ngram", tree="dynamic"), "only a model that drafts grows a tree"),
        (LevelConfig(drafter=["ngram", LevelConfig(drafter=["ngram"])]), "a list within a list"),
        (LevelConfig(drafter=["ngran"]), "Did you mean 'ngram'"),
    ],
)
def test_trees_and_lists_that_cannot_be(level: LevelConfig, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Engine(CascadeConfig([level, LevelConfig(model=ToyModel(), name="target")]), costs=FixedCosts(lambda *_: 1.0))


def test_an_empty_list_of_drafters_is_refused() -> None:
    with pytest.raises(ConfigError, match="name at least one drafter"):
        LevelConfig(drafter=[])
