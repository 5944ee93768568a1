"""Registers in memory: every slot allocated once, before the first step; and logical tensors put together from them again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from executor.backend import Array, Backend, numpy_dtype
from ir.errors import ProgramError
from ir.program import Program, Register
from ir.random import initial

Region = tuple[tuple[int, int], ...]

SLOT_ALIGNMENT = 64


class Buffers:
    """The slots of every register of a program on one backend.

    `slots[register]` has one array for each credit; item n lies in slot n % credits. Registers of one rank with the same arena share that arena's bytes,
    each slot at its place (`Register.places`); one that lies inside another shares that one's.
    """

    def __init__(self, program: Program, backend: Backend) -> None:
        self.program = program
        self.backend = backend
        self.nbytes = 0
        arenas = {key: self._allocate(size) for key, size in _arena_sizes(program).items()}
        self.slots: dict[str, tuple[Array, ...]] = {}
        alone: dict[str, Array] = {}
        for register in sorted(program.registers, key=lambda r: bool(r.inside)):
            _check(register)
            if register.inside:
                raw, places = alone[register.inside], register.places
            elif register.arena:
                raw, places = arenas[register.rank, register.arena], register.places
            else:
                stride = -(-register.nbytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
                raw, places = self._allocate(stride * register.credits), tuple(i * stride for i in range(register.credits))
                alone[register.name] = raw
            self.slots[register.name] = tuple(backend.view(raw, place, register.shape, register.dtype) for place in places)

    def _allocate(self, nbytes: int) -> Array:
        self.nbytes += nbytes if self.backend.has_arrays else 0
        return self.backend.allocate(nbytes)

    def fill(self, seed: int, given: Mapping[str, np.ndarray]) -> None:
        """Writes the initial items: from `given` by name of the logical tensor, else as the register's `init` says, drawn with `seed`."""
        alike: dict[tuple[str, Region, str], list[Register]] = {}
        for register in self.program.registers:
            if register.initial:
                alike.setdefault((register.tensor or register.name, _region(register), register.dtype), []).append(register)
        for registers in alike.values():
            # ranks that hold the same region share the drawing of it, which takes longer than a copy
            value = self._first_value(registers[0], seed, given)
            for register in registers:
                for slot in self.slots[register.name][: register.initial]:
                    self.backend.put(slot, value)

    def _first_value(self, register: Register, seed: int, given: Mapping[str, np.ndarray]) -> np.ndarray:
        shape = whole_shape(self.program, register.tensor) if register.tensor else register.shape
        if register.tensor in given:
            return _piece_of(given[register.tensor], register, shape)
        value: np.ndarray = initial(register.init, shape, _region(register), register.dtype, seed, register.tensor or register.name)
        return value.reshape(register.shape)

    def tensor(self, name: str, steps: int) -> np.ndarray:
        """The whole logical tensor after `steps` steps, put together from the regions that the ranks hold."""
        holders = holders_of(self.program, name)
        out = np.zeros(whole_shape(self.program, name), numpy_dtype(holders[0].dtype))
        for register in holders:
            array = self.slots[register.name][newest_item(self.program, register, steps) % register.credits]
            out[as_slices(register.region)] = self.backend.get(array)
        return out


def as_slices(region: Region, inside: Region | None = None) -> tuple[slice, ...]:
    """The region as an index of the whole tensor, or of what holds `inside` of it.

    >>> as_slices(((4, 6), (0, 3)), inside=((4, 8), (0, 3)))
    (slice(0, 2, None), slice(0, 3, None))
    """
    starts = [0] * len(region) if inside is None else [start for start, _ in inside]
    return tuple(slice(a - at, b - at) for (a, b), at in zip(region, starts, strict=True))


def whole_shape(program: Program, name: str) -> tuple[int, ...]:
    """The shape of a logical tensor: the union of the regions that registers hold of it."""
    regions = [r.region for r in program.holders.get(name, ())]
    if not regions:
        raise ProgramError(f"no register holds the tensor `{name}`; there are {', '.join(tensor_names(program)) or 'none with a name'}")
    return tuple(max(region[dim][1] for region in regions) for dim in range(len(regions[0])))


def tensor_names(program: Program) -> tuple[str, ...]:
    """The logical tensors that outlast a step: parameters, optimizer state, final gradients; in order of first register."""
    lasting = (r for r in program.registers if r.tensor and (r.initial or r.memory == "gradient"))
    return tuple(dict.fromkeys(r.tensor for r in lasting if not r.tensor.endswith("@acc")))


def state_names(program: Program) -> tuple[str, ...]:
    """The logical tensors that a checkpoint must hold: those that are there before the first step."""
    return tuple(dict.fromkeys(r.tensor for r in program.registers if r.tensor and r.initial))


def holders_of(program: Program, name: str) -> Sequence[Register]:
    """The registers to read a logical tensor from: those that the optimizer updates, else final gradients, else those that are never
    written (a frozen parameter; what is boxed of it lies in memory that others use too), else all that hold it."""
    here = program.holders.get(name, ())
    if not here:
        whole_shape(program, name)
    for choice in ([r for r in here if r.name in program.updated], [r for r in here if r.memory == "gradient"], [r for r in here if r.initial], here):
        if choice:
            return choice
    raise AssertionError(name)


def newest_item(program: Program, register: Register, steps: int) -> int:
    """The number of the item last published after `steps` steps."""
    firings = program.num_microbatches if register.clock == "microbatch" else 1
    is_made = register.name in program.written or register.name in program.updated
    return max(0, register.initial + (steps * firings if is_made else 0) - 1)


def _arena_sizes(program: Program) -> dict[tuple[int, str], int]:
    sizes: dict[tuple[int, str], int] = {}
    for r in program.registers:
        if r.arena:
            sizes[r.rank, r.arena] = max(sizes.get((r.rank, r.arena), 0), *(place + r.nbytes for place in r.places))
    return sizes


def _check(register: Register) -> None:
    itemsize = numpy_dtype(register.dtype).itemsize
    held = math.prod(register.shape) * itemsize
    if held != register.nbytes:
        raise ProgramError(f"register `{register.name}`: shape {register.shape} of {register.dtype} takes {held} bytes, nbytes is {register.nbytes}")
    for offset in (register.offset, *register.offsets):
        if offset % itemsize or offset < 0:
            raise ProgramError(f"register `{register.name}`: offset {offset} is no multiple of {itemsize} bytes, the size of {register.dtype}")
    if register.region and tuple(b - a for a, b in register.region) != register.shape:
        raise ProgramError(f"register `{register.name}`: region {register.region} does not have its shape {register.shape}")


def _region(register: Register) -> Region:
    return register.region or tuple((0, n) for n in register.shape)


def _piece_of(value: np.ndarray, register: Register, shape: tuple[int, ...]) -> np.ndarray:
    if value.shape != shape:
        raise ProgramError(f"tensor `{register.tensor}` was given with shape {value.shape}, the program holds {shape}")
    return value[as_slices(_region(register))].astype(numpy_dtype(register.dtype))
