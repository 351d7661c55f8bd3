import numpy as np
import pytest
from cascade_template import BigramDrafter as Mine

from cascade import Ask, Context, SamplingParams
from cascade.plugins import create

DISTRIBUTION, MODULE, PLUGIN, NAME = "cascade-template", "cascade_template", "template", "bigram"


def propose(tokens, want=4, cap=8, committed=None, **options):
    drafter = create().drafter(NAME, **options)
    ask = Ask(Context(0, tokens, committed), want, cap, SamplingParams(), None)
    [draft] = drafter.propose([ask])
    return list(draft.tokens)


def test_the_installed_plugin_is_found():
    assert isinstance(create().drafter(NAME), Mine)
    [row] = [row for row in create().listing() if row.name == NAME]
    assert (row.plugin, row.module) == (PLUGIN, MODULE)
    assert row.distribution.startswith(f"{DISTRIBUTION} ")


def test_follows_the_most_frequent_pairs():
    assert propose([1, 2, 1, 3, 1, 3, 5, 1]) == [3, 1, 3, 1]


@pytest.mark.parametrize(("want", "cap", "length"), [(0, 8, 0), (3, 8, 3), (8, 2, 2)])
def test_proposes_no_more_than_it_is_asked(want, cap, length):
    assert len(propose([1, 2, 1, 2, 1], want, cap)) == length


def test_an_unseen_token_has_no_follower():
    assert propose([1, 2, 3]) == []
    assert propose([7]) == []


def test_guesses_are_matched_but_not_learnt():
    assert propose([1, 2, 1, 9], committed=3) == []
    assert propose([1, 2, 5, 1], committed=3, want=1) == [2]


def test_min_count():
    assert propose([1, 2, 1], min_count=2) == []
    assert propose([1, 2, 1, 2, 1], min_count=2, want=1) == [2]


def test_tokens_are_plain_numbers_in_the_vocabulary():
    tokens = propose(np.array([4, 4, 4]))
    assert tokens == [4, 4, 4, 4]
    assert all(type(token) is int for token in tokens)
