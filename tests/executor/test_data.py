"""Text as training data: a function of (seed, step, sample), cut anyhow; refusals by name."""

from __future__ import annotations

import numpy as np
import pytest

from executor.data import ArrayData, TextData, library_text, text_data
from ir.errors import InputError

TEXT = bytes(range(1, 200))


def test_labels_are_the_next_byte():
    data = TextData(TEXT, 8, seed=3)
    ids, labels = (data.piece(name, 2, ((0, 5), (0, 8))) for name in ("ids", "labels"))
    assert ids.dtype == np.int64
    assert np.array_equal(ids + 1, labels)
    assert np.array_equal(ids[:, 1:], labels[:, :-1])


def test_a_piece_is_the_same_however_it_is_cut():
    data = TextData(TEXT, 8, seed=3)
    whole = data.piece("ids", 1, ((0, 6), (0, 8)))
    assert np.array_equal(TextData(TEXT, 8, seed=3).piece("ids", 1, ((2, 4), (3, 8))), whole[2:4, 3:8])
    others = [TextData(TEXT, 8, seed=4).piece("ids", 1, ((0, 6), (0, 8))), data.piece("ids", 2, ((0, 6), (0, 8)))]
    assert not any(np.array_equal(whole, other) for other in others)
    assert len({tuple(row) for row in whole}) > 1


def test_every_window_can_be_drawn():
    """A text one byte longer than a window has two places to start, and no third."""
    data = TextData(b"abcdefghij", 8)
    starts = {int(row[0]) - ord("a") for step in range(40) for row in data.piece("ids", step, ((0, 2), (0, 8)))}
    assert starts == {0, 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "is empty"),
        (b"ab\0cd", "is binary .* first at byte 2"),
        (b"short", "has 5 bytes; a sample of 8 tokens and its labels takes 9"),
        (b"\xff" * 20, "holds the byte 255"),
    ],
)
def test_text_that_cannot_be_used_is_refused(tmp_path, text, message):
    path = tmp_path / "text"
    path.write_bytes(text)
    with pytest.raises(InputError, match=message):
        text_data(path, 8, vocab=128)


def test_a_missing_file_and_an_unknown_input_are_named(tmp_path):
    with pytest.raises(InputError, match=r"cannot read .*nowhere: No such file"):
        text_data(tmp_path / "nowhere", 8)
    with pytest.raises(InputError, match="loads an input `pixels`"):
        TextData(TEXT, 8).piece("pixels", 0, ((0, 1), (0, 8)))
    with pytest.raises(InputError, match="loads an input `y`; there are x"):
        ArrayData({"x": np.zeros((1, 2))}).piece("y", 0, ((0, 1),))


def test_without_a_file_the_interpreters_own_sources_are_read():
    text = library_text(100_000)
    assert text == library_text(100_000)
    assert len(text) == 100_000
    assert text.isascii()
    assert b"def " in text
    assert text_data(None, 64).piece("ids", 0, ((0, 2), (0, 64))).max() < 128


def test_an_encoder_reads_what_stands_before_and_a_second_prediction_what_comes_after() -> None:
    data = TextData(bytes(range(65, 125)), seq=6, seed=1)
    whole = ((0, 5), (0, 6))
    ids, labels, later, source = (data.piece(name, 0, whole) for name in ("ids", "labels", "labels2", "source"))
    size = len(data.text)
    np.testing.assert_array_equal((labels - 65) % size, (ids - 65 + 1) % size)
    np.testing.assert_array_equal((later - 65) % size, (ids - 65 + 2) % size)
    np.testing.assert_array_equal((source - 65 + 6) % size, (ids - 65) % size)
    np.testing.assert_array_equal(data.piece("token_types", 0, ((0, 2), (2, 5))), [[0, 1, 1]] * 2)
    np.testing.assert_array_equal(data.piece("mask", 0, ((1, 3), (0, 2))), np.ones((2, 2)))
    with pytest.raises(InputError, match="loads an input `pixels`; text gives ids and labels, source, token_types and mask"):
        data.piece("pixels", 0, whole)
