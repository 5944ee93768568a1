"""What is trained on: the bytes of a text file, cut into windows that depend on (seed, step, sample) alone."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from executor.buffers import Region, as_slices
from ir.errors import InputError

DEFAULT_NBYTES = 1 << 20
"""How much of the interpreter's own library sources is read when no file is named."""


class Data(Protocol):
    """Where `load` actors get their inputs from."""

    def piece(self, name: str, step: int, region: Region) -> np.ndarray:
        """The part `region` of input `name` in the whole batch of a step."""


class TextData:
    """Next-byte prediction: `ids` are `seq` bytes from a random place of the text, `labels` the same moved on by one, `labels2` by two, and so on.

    For an encoder: `source` are the bytes before `ids`, `token_types` 0 in the first half of a sample and 1 in the second, `mask` hides nothing.
    Sample i of a step is the same whatever the plan, the number of ranks or the microbatch it falls into.
    """

    def __init__(self, text: bytes, seq: int, seed: int = 0, vocab: int = 256, source: str = "the text") -> None:
        if not text:
            raise InputError(f"{source} is empty; name a text file with at least {seq + 1} bytes")
        if b"\0" in text:
            raise InputError(f"{source} is binary (it holds NUL bytes, the first at byte {text.index(0)}); name a text file")
        if len(text) < seq + 1:
            raise InputError(f"{source} has {len(text)} bytes; a sample of {seq} tokens and its labels takes {seq + 1}")
        if max(text) >= vocab:
            raise InputError(f"{source} holds the byte {max(text)}, the model's vocabulary has {vocab} entries; take a text with bytes below that")
        self.text = np.frombuffer(text, np.uint8)
        self.seq = seq
        self.seed = seed

    def piece(self, name: str, step: int, region: Region) -> np.ndarray:
        moved = _moved(name, self.seq)
        (first, last), (start, stop) = region
        if name in ("mask", "token_types"):
            row = np.arange(start, stop) >= self.seq // 2 if name == "token_types" else np.ones(stop - start, bool)
            return np.broadcast_to(row, (last - first, stop - start)).astype(np.int64)
        begins = np.array([self._begin(step, sample) for sample in range(first, last)])
        return self.text[(begins[:, None] + np.arange(start, stop) + moved) % len(self.text)].astype(np.int64)

    def _begin(self, step: int, sample: int) -> int:
        """Where a sample starts: drawn by a counter-based generator whose counter is the sample."""
        draw = np.random.Philox(key=self.seed, counter=[0, 0, sample, step]).random_raw()
        return int(draw % np.uint64(len(self.text) - self.seq))


def _moved(name: str, seq: int) -> int:
    """How many bytes behind `ids` an input of this name starts; 0 of one that holds no text. InputError where there is none."""
    if name in ("ids", "mask", "token_types"):
        return 0
    if name == "source":
        return -seq
    if match := re.fullmatch(r"labels(\d*)", name):
        return int(match[1] or 1)
    raise InputError(f"the program loads an input `{name}`; text gives ids and labels, source, token_types and mask")


class ArrayData:
    """Given arrays by input name, each of shape [steps, batch, ...]; a run longer than that starts over."""

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.arrays = dict(arrays)

    def piece(self, name: str, step: int, region: Region) -> np.ndarray:
        if name not in self.arrays:
            raise InputError(f"the program loads an input `{name}`; there are {', '.join(self.arrays)}")
        array = self.arrays[name]
        piece: np.ndarray = array[step % len(array)][as_slices(region)]
        return piece


def text_data(path: str | Path | None, seq: int, seed: int = 0, vocab: int = 256) -> TextData:
    """The bytes of a file, or without one of the interpreter's own library sources, in order of their names."""
    if path is None:
        return TextData(library_text(), seq, seed, vocab, "the interpreter's library")
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; name a text file") from error
    return TextData(text, seq, seed, vocab, str(path))


def library_text(limit: int = DEFAULT_NBYTES) -> bytes:
    """The first `limit` bytes of the standard library's own modules that are plain ASCII, in order of their names."""
    found = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_bytes()
        if text.isascii() and b"\0" not in text:
            found += text
        if len(found) >= limit:
            break
    if not found:
        raise InputError("this interpreter has no library sources on disk; name a text file with --data")
    return bytes(found[:limit])
