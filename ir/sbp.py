"""Where the elements of one tensor lie on one axis of a device mesh: Split, Broadcast or Partial.

`axis` is an axis of the mesh, `dim` a dimension of the tensor. An nd-SBP is a tuple of `Sbp`, one for each mesh axis, outer axis first.
The notion is OneFlow's (Yuan et al., 2021, arXiv:2110.15032); DTensor's spelling parses as well.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ir.errors import SbpError


@dataclass(frozen=True, slots=True, order=True)
class Sbp:
    """One placement on one mesh axis: `S(dim)`, `B`, `P` (to be summed) or `P(max)`.

    >>> S(1), B, P, P_MAX
    (S(1), B, P, P(max))
    """

    kind: str
    dim: int = -1
    reduce: str = ""

    def __repr__(self) -> str:
        if self.kind == "S":
            return f"S({self.dim})"
        return "P(max)" if self.reduce == "max" else self.kind

    @property
    def is_split(self) -> bool:
        return self.kind == "S"

    @property
    def is_broadcast(self) -> bool:
        return self.kind == "B"

    @property
    def is_partial(self) -> bool:
        return self.kind == "P"


NdSbp = tuple[Sbp, ...]

B = Sbp("B")
P = Sbp("P", reduce="sum")
P_MAX = Sbp("P", reduce="max")


@lru_cache(maxsize=64)
def S(dim: int) -> Sbp:
    """Split along `dim`; on a mesh axis of size n, rank i holds the i-th of n slices, the first ones larger."""
    if dim < 0:
        raise SbpError(f"a split needs a dim of 0 or more, got {dim}")
    return Sbp("S", dim)


_SPELLINGS = (
    (re.compile(r"(?:S|Shard)\s*\(\s*(?:dim\s*=\s*)?(\d+)\s*\)|S(\d+)"), None),
    (re.compile(r"B|R|Replicate(?:\(\))?"), B),
    (re.compile(r"P(?:\(\s*sum\s*\))?|Partial(?:\(\s*(?:'?sum'?)?\s*\))?"), P),
    (re.compile(r"P\(\s*max\s*\)|Partial\(\s*'?max'?\s*\)"), P_MAX),
)


def parse_sbp(text: str) -> Sbp:
    """Reads `S(0)`, `B`, `P`, `P(max)`, or DTensor's `Shard(dim=0)`, `Replicate()`, `Partial(sum)`.

    >>> [parse_sbp(t) for t in ("S(0)", "Shard(dim=1)", "Replicate()", "Partial(max)")]
    [S(0), S(1), B, P(max)]
    """
    for pattern, value in _SPELLINGS:
        match = pattern.fullmatch(text.strip())
        if match:
            return value if value is not None else S(int(match.group(1) or match.group(2)))
    raise SbpError(f"`{text}` is no placement; write S(dim), B, P or P(max), or DTensor's Shard(dim), Replicate(), Partial()")


def format_nd(nd: Sequence[Sbp], axes: Sequence[str]) -> str:
    """
    >>> format_nd((S(0), P), ("dp", "tp"))
    '[dp: S(0), tp: P]'
    """
    if len(nd) != len(axes):
        raise SbpError(f"{len(nd)} placements {tuple(nd)} for {len(axes)} mesh axes {tuple(axes)}")
    return "[" + ", ".join(f"{axis}: {sbp!r}" for axis, sbp in zip(axes, nd, strict=True)) + "]"


def parse_nd(text: str) -> tuple[tuple[str, ...], NdSbp]:
    """
    >>> parse_nd("[dp: S(0), tp: P(max)]")
    (('dp', 'tp'), (S(0), P(max)))
    """
    body = text.strip()
    if not (body.startswith("[") and body.endswith("]")):
        raise SbpError(f"`{text}` is no nd-SBP; write for example [dp: S(0), tp: B]")
    axes: list[str] = []
    nd: list[Sbp] = []
    for part in filter(None, (p.strip() for p in body[1:-1].split(","))):
        axis, colon, sbp = part.partition(":")
        if not colon or not axis.strip().isidentifier():
            raise SbpError(f"`{part}` in `{text}` is no `axis: placement`")
        axes.append(axis.strip())
        nd.append(parse_sbp(sbp))
    return tuple(axes), tuple(nd)


def split_sizes(size: int, parts: int) -> tuple[int, ...]:
    """The lengths of `parts` slices of a dim of length `size`; the first ones are the larger.

    >>> split_sizes(10, 4)
    (3, 3, 2, 2)
    """
    small, larger = divmod(size, parts)
    return (small + 1,) * larger + (small,) * (parts - larger)


def local_region(shape: Sequence[int], nd: Sequence[Sbp], mesh_shape: Sequence[int], coords: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """(start, stop) for each dim: what the rank at `coords` holds of a tensor of `shape`.

    A dim that several axes split is cut in turn, outer axis first.

    >>> local_region((10, 4), (S(0), S(0)), (2, 2), (0, 1))
    ((3, 5), (0, 4))
    """
    region = [(0, n) for n in shape]
    for sbp, parts, i in zip(nd, mesh_shape, coords, strict=True):
        if sbp.is_split:
            if sbp.dim >= len(shape):
                raise SbpError(f"{sbp!r} asks for dim {sbp.dim} of a tensor of shape {tuple(shape)}")
            start, stop = region[sbp.dim]
            sizes = split_sizes(stop - start, parts)
            start += sum(sizes[:i])
            region[sbp.dim] = (start, start + sizes[i])
    return tuple(region)


def local_shape(shape: Sequence[int], nd: Sequence[Sbp], mesh_shape: Sequence[int], coords: Sequence[int] | None = None) -> tuple[int, ...]:
    """The shape that one rank holds; without `coords` that of the first rank, which is never smaller than another's.

    >>> local_shape((10, 4), (S(0), B), (3, 2))
    (4, 4)
    """
    where = (0,) * len(mesh_shape) if coords is None else coords
    return tuple(stop - start for start, stop in local_region(shape, nd, mesh_shape, where))
