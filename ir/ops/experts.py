"""Mixture of experts with static shapes: the choice of experts, and tokens on their way to them and back.

A sample's tokens stand before each expert in a queue of `c` slots, in the order of the sequence: `dispatch` gives [e b c h], experts outermost, so that a split
of the samples (S(1)) becomes a split of the experts (S(0)) by one all-to-all. A queue belongs to one sample, so what an expert sees does not depend on how the
batch is cut. **Dropped**: what comes when the queue is full is not seen by that expert and adds nothing to its token; with `c` = the length of the sequence
nothing ever is. Slots that stay empty hold zeros, and `combine` reads none of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ir.op import Context, contraction, op
from ir.ops.algebra import contract
from ir.ops.elementwise import copy
from ir.ops.tiles import each, matrix

# ---- the choice ------------------------------------------------------------------------------------------------------------------------------------


def _largest(xp: Any, scores: Any, k: int) -> Any:
    """Indices of the `k` largest of each row, largest first, the earlier of two equals first."""
    return xp.argsort(-scores, axis=-1, kind="stable")[..., :k]


def _choose(c: Context, scores: Any, moved: Any, weight: Any, expert: Any) -> None:
    """By `moved` scores, in the best groups alone where experts are grouped; the weights are the scores themselves."""
    xp, attrs = c.xp, c.attrs
    rows, for_choice, chosen = matrix(scores), matrix(moved), matrix(expert)
    groups = attrs.get("groups", 1)
    if groups > 1:
        by_group = for_choice.reshape(len(rows), groups, -1)
        best = xp.sort(by_group, axis=-1)[:, :, -attrs.get("of_group", 1) :].sum(axis=-1)
        open_ = xp.zeros(best.shape, bool)
        xp.put_along_axis(open_, _largest(xp, best, attrs["top_groups"]), True, axis=-1)
        for_choice = xp.where(open_[:, :, None], by_group, -xp.inf).reshape(rows.shape)
    index = _largest(xp, for_choice, chosen.shape[-1])
    chosen[...] = index
    matrix(weight)[...] = xp.take_along_axis(rows, index, axis=-1)


def top_k(c: Context, scores: Any, weight: Any, expert: Any) -> None:
    _choose(c, scores, scores, weight, expert)


def top_k_moved(c: Context, scores: Any, bias: Any, weight: Any, expert: Any) -> None:
    _choose(c, scores, scores + bias, weight, expert)


def top_k_dscores(c: Context, dweight: Any, expert: Any, dscores: Any) -> None:
    dscores[...] = 0.0
    rows, chosen, cotangents = matrix(dscores), matrix(expert).astype("int64") - c.at.get("e", 0), matrix(dweight)
    for j in range(chosen.shape[-1]):
        (found,) = c.xp.nonzero((chosen[:, j] >= 0) & (chosen[:, j] < rows.shape[-1]))
        rows[found, chosen[found, j]] += cotangents[found, j]


# ---- balance ---------------------------------------------------------------------------------------------------------------------------------------


def expert_load(c: Context, probs: Any, expert: Any, load: Any, mass: Any) -> None:
    chosen = expert.reshape(-1).astype("int64") - c.at.get("e", 0)
    here = chosen[(chosen >= 0) & (chosen < len(load))]
    load[...] = c.xp.bincount(here, minlength=len(load)) / c.sizes["k"]
    c.xp.sum(matrix(probs), axis=0, out=mass)


def expert_load_dprobs(c: Context, dmass: Any, dprobs: Any) -> None:
    dprobs[...] = dmass


def balance(c: Context, load: Any, mass: Any, out: Any) -> None:
    out[...] = (load * mass).sum() * c.attrs["factor"]


def balance_dmass(c: Context, dout: Any, load: Any, dmass: Any) -> None:
    c.xp.multiply(load, dout * c.attrs["factor"], out=dmass)


def spread(c: Context, x: Any, out: Any) -> None:
    out[...] = x


def spread_dx(c: Context, dout: Any, dx: Any) -> None:
    dx[...] = dout.sum(dtype="float64")


# ---- on the way ------------------------------------------------------------------------------------------------------------------------------------


def _routes(c: Context, expert: Any) -> Iterator[tuple[int, Any, Any]]:
    """For each of the k choices its number, the tokens [b s] whose choice has a slot here, and the slots of [e b c] that they have."""
    xp, (b, s, k) = c.xp, expert.shape
    num_experts, capacity, first, here = c.total["e"], c.sizes["c"], c.at.get("e", 0), c.sizes["e"]
    wanted = expert.reshape(-1).astype("int64")
    sample = xp.repeat(xp.arange(b), s * k)
    queue = sample * num_experts + wanted
    order = xp.argsort(queue, kind="stable")
    ordered = queue[order]
    place = xp.empty_like(queue)
    place[order] = xp.arange(len(queue)) - xp.searchsorted(ordered, ordered)
    held = (place < capacity) & (wanted >= first) & (wanted < first + here)
    slot = ((wanted - first) * b + sample) * capacity + place
    for j in range(k):
        (tokens,) = xp.nonzero(held[j::k])
        yield j, tokens, slot[j::k][tokens]


def dispatch(c: Context, x: Any, expert: Any, out: Any) -> None:
    out[...] = 0.0
    for _, tokens, slots in _routes(c, expert):
        matrix(out)[slots] = matrix(x)[tokens]


def dispatch_dx(c: Context, dout: Any, expert: Any, dx: Any) -> None:
    dx[...] = 0.0
    for _, tokens, slots in _routes(c, expert):
        matrix(dx)[tokens] += matrix(dout)[slots]


def combine(c: Context, y: Any, weight: Any, expert: Any, out: Any) -> None:
    out[...] = 0.0
    for j, tokens, slots in _routes(c, expert):
        matrix(out)[tokens] += matrix(weight)[tokens, j, None] * matrix(y)[slots]


def combine_dy(c: Context, dout: Any, weight: Any, expert: Any, dy: Any) -> None:
    dy[...] = 0.0
    for j, tokens, slots in _routes(c, expert):
        matrix(dy)[slots] = matrix(weight)[tokens, j, None] * matrix(dout)[tokens]


def combine_dweight(c: Context, dout: Any, y: Any, expert: Any, dweight: Any) -> None:
    dweight[...] = 0.0
    for j, tokens, slots in _routes(c, expert):
        matrix(dweight)[tokens, j] = c.xp.einsum("nh,nh->n", matrix(dout)[tokens], matrix(y)[slots])


# ---- inside --------------------------------------------------------------------------------------------------------------------------------------


def expert_bias(c: Context, x: Any, bias: Any, out: Any) -> None:
    c.xp.add(x, bias[:, None, None, :], out=out)


def expert_bias_dbias(c: Context, dout: Any, dbias: Any) -> None:
    c.xp.sum(dout, axis=(1, 2), out=dbias)


OPS = (
    # attrs: k; where experts are grouped groups, top_groups (so many groups stay open) and of_group (a group counts as the sum of so many of its best)
    op("top_k(scores[... e]) -> weight[... k], expert[... k]", top_k, whole="e k", stop="expert", integers="expert", grads=("top_k.dscores",), flops=each(1)),
    # the same, but that a bias (which learns by no gradient) is added to the scores for the choice alone: DeepSeek-V3 (arXiv:2412.19437, section 2.1.2)
    op("top_k_moved(scores[... e], bias[e]) -> weight[... k], expert[... k]", top_k_moved, whole="e k", stop="bias expert", integers="expert",
       grads=("top_k.dscores",), flops=each(2)),
    # attrs: e
    op("top_k.dscores(dweight[... k], expert[... k]) -> dscores[... e]", top_k_dscores, sums="k", linear=["dweight"], stop="expert",
       flops=each(0)),
    # Of each expert the tokens that chose it, over k, and the sum of its probabilities
    op("expert_load(probs[b s e], expert[b s k]) -> load[e], mass[e]", expert_load, whole="k", sums="b s", linear=["probs -> mass"], stop="expert load",
       grads=("expert_load.dprobs",), flops=each(1, without="k")),
    op("expert_load.dprobs(dmass[e]) -> dprobs[b s e]", expert_load_dprobs, linear=["dmass"], flops=each(0)),  # attrs: b, s
    # The balancing loss of Shazeer et al. (arXiv:1701.06538) as the Switch Transformer has it (arXiv:2101.03961, equation 4); attrs: factor
    op("balance(load[e], mass[e]) -> out[]", balance, sums="e", linear=["load", "mass"], stop="load", grads=("balance.dmass",), flops=each(2)),
    op("balance.dmass(dout[], load[e]) -> dmass[e]", balance_dmass, linear=["dout", "load"], stop="load", flops=each(1)),
    # One number for every token; attrs: b, s
    op("spread(x[]) -> out[b s]", spread, linear=["x"], grads=("spread.dx",), flops=each(0)),
    op("spread.dx(dout[b s]) -> dx[]", spread_dx, sums="b s", linear=["dout"], flops=each(1)),
    # attrs: e, c
    op("dispatch(x[b s h], expert[b s k]) -> out[e b c h]", dispatch, whole="s k c", linear=["x"], stop="expert", grads=("dispatch.dx",), flops=each(0)),
    op("dispatch.dx(dout[e b c h], expert[b s k]) -> dx[b s h]", dispatch_dx, whole="s k c", sums="e", linear=["dout"], stop="expert",
       flops=each(1, without="s k")),
    op("combine(y[e b c h], weight[b s k], expert[b s k]) -> out[b s h]", combine, whole="s k c", sums="e", linear=["y", "weight"], stop="expert",
       grads=("combine.dy", "combine.dweight"), flops=each(2, without="s k")),
    # attrs: e, c
    op("combine.dy(dout[b s h], weight[b s k], expert[b s k]) -> dy[e b c h]", combine_dy, whole="s k c", linear=["dout", "weight"], stop="expert",
       flops=each(2, without="s k")),
    op("combine.dweight(dout[b s h], y[e b c h], expert[b s k]) -> dweight[b s k]", combine_dweight, whole="s k c", sums="e h", linear=["dout", "y"],
       stop="expert", flops=each(2, without="s k")),
    *contraction("grouped_linear(x[e b c k], w[e k n]) -> out[e b c n]", contract),
    op("expert_bias(x[e b c n], bias[e n]) -> out[e b c n]", expert_bias, linear=["x bias"], grads=("expert_bias.dx", "expert_bias.dbias"), flops=each(1)),
    op("expert_bias.dx(dout[e b c n]) -> dx[e b c n]", copy, linear=["dout"], flops=each(0), copies=True),
    op("expert_bias.dbias(dout[e b c n]) -> dbias[e n]", expert_bias_dbias, sums="b c", linear=["dout"], flops=each(1)),
)  # fmt: skip
