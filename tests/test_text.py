"""Text as it grows: pieces join to the decoded whole, no half characters, stop strings at the earliest match."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cascade.text import REPLACEMENT, TextStream


def decode_bytes(ids: Sequence[int]) -> str:
    """A byte-level tokenizer: id = byte."""
    return bytes(ids).decode("utf-8", errors="replace")


@given(st.text(max_size=40))
def test_pieces_join_to_the_text_and_never_hold_half_a_character(text: str) -> None:
    """ai-dynamo/dynamo#12630: replacement characters when a character was split over tokens."""
    stream, shown = TextStream(decode_bytes), 0
    for byte in text.encode():
        stream.push(byte)
        assert REPLACEMENT not in stream.text or REPLACEMENT in text
        assert stream.text.startswith(text[:shown])
        shown = stream.safe
    assert stream.finish() == text


def test_a_text_that_ends_inside_a_character_is_decoded_as_it_is() -> None:
    stream = TextStream(decode_bytes)
    for byte in "né".encode()[:-1]:
        stream.push(byte)
    assert stream.text == "n"
    assert stream.finish() == decode_bytes("né".encode()[:-1])


def decode_runs(ids: Sequence[int]) -> str:
    """A tokenizer with byte fallback, as Llama 2's: ids from 256 on are characters, below bytes, decoded by runs."""
    out, run = "", b""
    for i in [*ids, None]:
        if i is not None and i < 256:
            run += bytes([i])
            continue
        try:
            out += run.decode()
        except UnicodeDecodeError:
            out += REPLACEMENT * len(run)
        run = b""
        out += "" if i is None else chr(i - 256)
    return out


def test_characters_of_several_tokens_are_shown_at_once_where_nothing_can_change_them() -> None:
    stream = TextStream(decode_bytes)
    for i, byte in enumerate("中文字".encode()):
        stream.push(byte)
        assert len(stream.text) == (i + 1) // 3


@pytest.mark.parametrize("cut", range(1, 12))
def test_bytes_that_a_tokenizer_decodes_by_runs(cut: int) -> None:
    ids = [*"\U0001f600\U0001f600".encode(), 256 + ord("a"), *"é".encode(), 256 + ord("b")][:cut]
    stream, shown = TextStream(decode_runs), ""
    for token in ids:
        stream.push(token)
        assert stream.text.startswith(shown)
        shown = stream.text
    assert stream.finish() == decode_runs(ids)
    assert stream.text.startswith(shown)


@pytest.mark.parametrize(
    ("text", "stops", "want"),
    [
        ("one ab two", ["ab"], "one "),
        ("one ab two cd", ["cd", "ab"], "one "),
        ("aXbXc", ["Xc", "bX"], "aX"),
        ("abab", ["bab"], "a"),
        ("no such", ["zz"], "no such"),
        ("edge ab", ["ab"], "edge "),
        ("é ü ab", ["ü a"], "é "),
    ],
)
def test_the_text_is_cut_before_the_earliest_stop_string(text: str, stops: list[str], want: str) -> None:
    """sgl-project/sglang#23802: a stop string that finished early in a block was missed."""
    stream = TextStream(decode_bytes, stops)
    shown = ""
    for byte in text.encode():
        done = stream.push(byte)
        shown = stream.text[: stream.safe] if len(shown) <= stream.safe else shown
        assert want.startswith(shown), "what was shown can never be taken back"
        if done:
            break
    assert stream.finish() == want
    assert stream.stopped == (want != text)


def test_a_stop_string_before_half_a_character_is_found_at_once() -> None:
    pieces = [b"on ", b"ab\xc3", b"\xa9"]

    def decode(ids: Sequence[int]) -> str:
        return b"".join(pieces[i] for i in ids).decode(errors="replace")

    stream = TextStream(decode, ["ab"])
    assert [stream.push(0), stream.push(1)] == [False, True]
    assert stream.finish() == "on "
    stream = TextStream(decode, ["x"])
    assert [stream.push(i) for i in range(3)] == [False] * 3
    assert stream.finish() == "on abé"
