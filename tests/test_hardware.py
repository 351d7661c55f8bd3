"""Costs by arithmetic against numbers worked out by hand, and what a user may write of a machine."""

import itertools

import pytest

from cascade.costs import FixedCosts
from cascade.errors import ConfigError
from cascade.planning.hardware import GPUS, LINK, AssumedCosts, Away, Link, OnTheWay, Roofline, Told
from cascade.planning.what_if import assumed_costs, away, read_what_if, remarks

LEVELS = ("ngram", "draft", "target")
BIG = "target:params=70B,dtype=bf16,gpus=8,gpu=h100,efficiency=0.5"


def costs(*texts, otherwise=None):
    return assumed_costs(read_what_if(texts, LEVELS), otherwise)


# -- the arithmetic ----------------------------------------------------------------------------------


def test_few_tokens_take_the_time_to_read_the_weights():
    # 140 GB by 8 times half of 3.35 TB/s: 10.448 ms.
    assert costs(BIG).seconds("target", 1) == pytest.approx(140e9 / (4 * 3.35e12))
    assert costs(BIG).seconds("target", 1) == pytest.approx(10.448e-3, rel=1e-4)
    assert costs(BIG).seconds("target", 100) == costs(BIG).seconds("target", 1)


def test_many_tokens_take_the_time_of_their_arithmetic():
    # 1000 tokens: 2 * 70e9 * 1000 operations by 8 times half of 989 TFLOP/s: 35.39 ms.
    assert costs(BIG).seconds("target", 1000) == pytest.approx(140e12 / (4 * 989e12))
    assert costs(BIG).seconds("target", 1000) == pytest.approx(35.39e-3, rel=1e-3)


def test_layers_add_two_all_reduces_each():
    # 160 times 10 us, and 160 times 2 * 7/8 * 8192 * 2 bytes by 450 GB/s: 1.6 ms and 10.2 us.
    found = costs(BIG + ",layers=80,hidden=8192").seconds("target", 1) - costs(BIG).seconds("target", 1)
    assert found == pytest.approx(160 * (10e-6 + 28672 / 450e9))
    slow = costs(BIG + ",layers=80,hidden=8192", "interconnect:latency=20us,bandwidth=10GB/s").seconds("target", 2)
    assert slow - costs(BIG).seconds("target", 2) == pytest.approx(160 * (20e-6 + 57344 / 10e9))


def test_one_gpu_has_nobody_to_tell():
    one = costs("target:params=8B,gpu=a100,layers=32,hidden=4096,efficiency=1")
    assert one.seconds("target", 1) == pytest.approx(16e9 / 2.039e12)


@pytest.mark.parametrize(
    ("dtype", "seconds", "flops"),
    [("bf16", 16e9, 989e12), ("fp8", 8e9, 1979e12), ("int8", 8e9, 1979e12), ("int4", 4e9, 989e12)],
)
def test_dtypes_decide_bytes_and_operations(dtype, seconds, flops):
    one = costs(f"target:params=8B,gpu=h100,dtype={dtype},efficiency=1,launch=1ms")
    assert one.seconds("target", 1) == pytest.approx(seconds / 3.35e12 + 1e-3)
    assert one.seconds("target", 10**6) == pytest.approx(16e15 / flops + 1e-3)


def test_a_machine_of_ones_own():
    own = costs("draft:params=1B,bytes=1,bandwidth=50GB/s,flops=1T,efficiency=1")
    assert own.seconds("draft", 1) == pytest.approx(0.02)
    assert own.seconds("draft", 100) == pytest.approx(0.2)


@pytest.mark.parametrize("gpu", GPUS)
def test_costs_never_fall_with_tokens(gpu):
    many = costs(f"target:params=13B,gpu={gpu},gpus=4,layers=40,hidden=5120,launch=20us")
    times = [many.seconds("target", tokens) for tokens in (1, 2, 3, 5, 8, 64, 300, 4096)]
    assert all(a <= b for a, b in itertools.pairwise(times))
    assert times[0] > 0


def test_what_is_told_counts_every_further_token():
    told = costs("draft:seconds=2ms,per_token=0.1ms", "ngram:seconds=5us")
    assert told.seconds("draft", 1) == pytest.approx(2e-3)
    assert told.seconds("draft", 11) == pytest.approx(3e-3)
    assert told.draft_seconds("ngram", 7) == pytest.approx(35e-6)
    assert Told(1.0).seconds(0) == 1.0


def test_levels_that_are_not_mentioned_keep_their_costs():
    measured = FixedCosts(lambda level, tokens: 0.5 * tokens, lambda level, tokens: 0.25 * tokens)
    mixed = costs("target:seconds=1s", otherwise=measured)
    assert (mixed.seconds("target", 9), mixed.seconds("draft", 2, 2)) == (1.0, 1.0)
    assert mixed.draft_seconds("ngram", 2, 2) == 1.0
    assert AssumedCosts({}).seconds("draft", 1) is None


def way(*texts, q_tokens=0):
    found = read_what_if(["target:seconds=10ms", "draft:seconds=1ms", *texts], LEVELS)
    return OnTheWay(assumed_costs(found, None), away(found, q_tokens), LEVELS)


def test_a_proposal_from_elsewhere_goes_there_and_back_once():
    remote = way("draft:placement=remote")
    forwards = [remote.seconds(level, 2, 2) for level in ("draft", "draft", "ngram", "draft", "target", "draft")]
    each = 1e-3 + 16 / 12.5e9  # two ids there, two back
    assert forwards[2] is None
    assert [forwards[i] for i in (0, 1, 3, 4, 5)] == pytest.approx([each + 1e-4, each, each, 10e-3, each + 1e-4])


def test_distributions_travel_as_well():
    slow = way("draft:placement=remote", "link:latency=1ms,bandwidth=8Mbit/s", q_tokens=1000)
    assert slow.seconds("draft", 3, 1) == pytest.approx(3e-3 + (3 * 4 + 2004) / 1e6)


def test_ones_own_gpu_is_on_the_interconnect():
    assert way("draft:placement=own").seconds("draft", 1) == pytest.approx(1.02e-3, rel=1e-4)
    assert way("draft:placement=same").seconds("draft", 1) == 1e-3


def test_defaults_are_what_the_module_says():
    assert Roofline(1e9, 2, 1e12, 1e12).seconds(1) == pytest.approx(2e9 / 0.7e12)
    assert Away(LINK).seconds(1, 1, True) == pytest.approx(100e-6, rel=1e-3)
    assert Link(1.0, 2.0).seconds(4) == 3.0


# -- what a user writes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("draft", "write NAME:KEY=VALUE"),
        ("draft:", "write NAME:KEY=VALUE"),
        ("drafd:seconds=1ms", "no level is named 'drafd'. Did you mean 'draft'?"),
        ("draft:secnds=1ms", "there is no key 'secnds'. Did you mean 'seconds'?"),
        ("link:seconds=1ms", "there is no key 'seconds'"),
        ("draft:seconds=12", "seconds must be written like 12ms, 30us or 0.2s, not '12'"),
        ("draft:seconds=12 minutes", "seconds must be written like"),
        ("draft:seconds=0ms", "seconds must be written like"),
        ("draft:seconds", "seconds must be written like"),
        ("draft:seconds=1.2.3ms", "seconds must be written like"),
        ("link:bandwidth=100", "bandwidth must be written like 3.35TB/s, 100GB/s or 100Gbit/s, not '100'"),
        ("target:params=70X", "params must be written like 70B"),
        ("target:params=7B,gpu=h300", "gpu must be one of h100, h200"),
        ("target:params=7B,gpu=h100,gpus=0", "gpus must be an integer of at least 1"),
        ("target:params=7B,gpu=h100,efficiency=70", "efficiency must lie between 0 and 1"),
        ("target:params=7B", "params= needs gpu="),
        ("target:params=7B,bandwidth=1TB/s", "params= needs gpu="),
        ("target:gpu=h100", "gpu= needs params="),
        ("target:params=7B,gpu=h100,layers=3", "layers= and hidden= go together"),
        ("target:params=7B,gpu=h100,dtype=fp8,bytes=1", "give dtype= or bytes=, not both"),
        ("target:params=7B,gpu=h100,seconds=1ms", "give seconds= or params=, not both"),
        ("draft:per_token=1ms", "per_token= needs seconds="),
        ("draft:seconds=1ms,seconds=2ms", "seconds of draft is given twice"),
        ("target:seconds=1ms,placement=remote", "the target is where it is"),
    ],
)
def test_what_cannot_be_used_is_one_line(text, message):
    with pytest.raises(ConfigError) as caught:
        read_what_if([text], LEVELS)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_texts_of_one_name_are_joined_and_names_may_have_colons():
    found = read_what_if(["a:b:params=7B", "a:b:gpu=l40s", "link:latency=0ms", "engine:overhead=0.5ms"], ["a:b", "t"])
    assert found.levels == {"a:b": {"params": 7e9, "gpu": "l40s"}}
    assert (found.link, found.overhead) == ({"latency": 0.0}, 0.5e-3)


def test_a_level_called_link_is_a_level():
    assert read_what_if(["link:seconds=1ms"], ["link", "t"]).levels == {"link": {"seconds": 1e-3}}


def test_remarks_say_what_is_not_counted():
    found = read_what_if(["target:params=70B,gpu=h100,gpus=8", "draft:placement=remote"], LEVELS)
    lines = remarks(found, LEVELS, measured=True)
    assert lines[0] == "ngram is not assumed: it keeps its measured costs"
    assert lines[1].startswith("draft is not assumed")
    assert "8 GPUs" in lines[2]
    assert "free" in remarks(found, LEVELS, measured=False)[0]
