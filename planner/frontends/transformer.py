"""The forward graph of a transformer, from its config: a decoder, an encoder, or both, over tokens or an image.

What a block does is told by its config (`planner.frontends.config`), in `planner.frontends.attention` and `mlp` how; the names are one scheme for all:

    wte  wpe  wtt  embed                              layer 0: tokens, positions, token types
    h.<i>.ln_1  h.<i>.attn...  h.<i>.attn.residual
    h.<i>.ln_2  h.<i>.mlp...   h.<i>.mlp.residual     layer i + 1
    ln_f  lm_head  loss                               layer L + 1

An encoder's blocks are `enc.h.<i>`; they come first in the chain, the decoder's embedding stands in the layer of its first block, and what the encoder gave is
carried on from layer to layer, so that a pipeline cut anywhere is crossed by it and the stream alone. The block of an extra prediction is `mtp.<i>.h`. Inputs
are `ids` and `labels`; with an encoder `source`, the tokens that it reads; with token types `token_types`; with padding `mask` (0 where a key is hidden); for
images `pixels` instead of `ids`; `labels2`, ... are the labels of extra predictions.

A parameter is called like the node that reads it, plus `.weight` or `.bias`. Projections hold [inputs, outputs]; the two tables `wte.weight` and
`lm_head.weight` hold [vocabulary, hidden], so that a tied head reads the very tensor of the embedding.
"""

from __future__ import annotations

from collections.abc import Callable

from ir.errors import GraphError
from ir.graph import Builder, Graph
from ir.units import dtype_name
from planner.frontends.attention import attention_params, write_attention
from planner.frontends.config import MAX_SIZE, Block, Experts, ModelConfig
from planner.frontends.mlp import mlp_params, write_mlp
from planner.frontends.writer import ZEROS, Param, Params, Writer, linear_params, norm_params, normal, salt

Part = Callable[[str], str]
"""Writes a part of a block over a tensor and returns what it gives."""

# ---- parameters ------------------------------------------------------------------------------------------------------------------------------------


def embedding_params(c: ModelConfig) -> Params:
    """Parameters before the blocks, by name."""
    out: Params = {}
    if c.image is None:
        out |= {"wte.weight": Param((c.vocab, c.hidden), normal(c.init_std))}
    else:
        out |= linear_params("patches", c.image.channels * c.image.patch**2, c.hidden, True, c.init_std) | {"cls": Param((c.hidden,), normal(c.init_std))}
    if c.learned:
        out |= {"wpe.weight": Param((c.max_positions, c.hidden), normal(c.init_std))}
    if c.token_types:
        out |= {"wtt.weight": Param((c.token_types, c.hidden), normal(c.init_std))}
    return out | (norm_params(c.embed_norm, "embed.norm", c.hidden) if c.embed_norm else {})


def output_params(c: ModelConfig) -> Params:
    """Parameters after the blocks, by name."""
    out = norm_params(c.norm, "ln_f", c.hidden) if c.norm else {}
    if c.head_activation:
        out |= linear_params("head", c.hidden, c.hidden, True, c.init_std) | norm_params(c.blocks[-1].norm, "head.norm", c.hidden)
    if not c.tied:
        out |= {"lm_head.weight": Param((c.vocab, c.hidden), normal(c.init_std))}
    return out | ({"lm_head.bias": Param((c.vocab,), ZEROS)} if c.head_bias else {})


def block_params(c: ModelConfig, block: Block) -> Params:
    """Parameters of one block, by their name inside it."""
    out = _block_norms(c, block, "1") | attention_params(c, block.attention)
    if block.cross is not None:
        out |= _block_norms(c, block, "x") | attention_params(c, block.cross, "cross")
    return out | (_block_norms(c, block, "2") if block.residual != "shared" else {}) | mlp_params(c, block.mlp)


def _block_norms(c: ModelConfig, block: Block, which: str) -> Params:
    out = norm_params(block.norm, f"ln_{which}", c.hidden)
    return out | norm_params(block.norm, f"ln_{which}_after", c.hidden) if block.residual == "sandwich" else out


def stack_params(c: ModelConfig, blocks: tuple[Block, ...], at: str = "") -> Params:
    """Parameters of a stack of blocks, by name; `at` stands before each."""
    first, inside = blocks[0].attention, {block: block_params(c, block) for block in dict.fromkeys(blocks)}
    out: Params = {}
    if first.relative is not None:
        out |= {f"{at}relative.weight": Param((first.relative[0], first.num_heads), normal(c.init_std))}
    return out | {f"{at}h.{i}.{name}": p for i, block in enumerate(blocks) for name, p in inside[block].items()}


def _prediction_params(c: ModelConfig, i: int) -> Params:
    """Parameters of an extra prediction."""
    at, norm = f"mtp.{i}", c.blocks[-1].norm
    out = norm_params(norm, f"{at}.ln_stream", c.hidden) | norm_params(norm, f"{at}.ln_token", c.hidden) | norm_params(norm, f"{at}.ln_f", c.hidden)
    for name in ("from_stream", "from_token"):
        out |= linear_params(f"{at}.{name}", c.hidden, c.hidden, False, c.init_std)
    return out | {f"{at}.h.{name}": p for name, p in block_params(c, c.blocks[-1]).items()}


def params(c: ModelConfig) -> Params:
    """Every parameter by its name in the graph, in the order of the layers."""
    out = embedding_params(c)
    if c.encoder:
        assert c.norm is not None
        out |= stack_params(c, c.encoder, "enc.") | norm_params(c.norm, "enc.ln_f", c.hidden)
    out |= stack_params(c, c.blocks)
    for i in range(c.extra_predictions):
        out |= _prediction_params(c, i)
    return out | output_params(c)


def num_params(c: ModelConfig) -> int:
    """Elements of all parameters; a tied table counts once."""
    return sum(p.num_elements for p in params(c).values())


# ---- the graph -------------------------------------------------------------------------------------------------------------------------------------


def build(c: ModelConfig, name: str, batch: int, seq: int, dtype: str) -> Graph:
    """The forward graph of one microbatch of `batch` samples of `seq` tokens (an image's patches and its class token), output the scalar `loss`.

    The loss is the mean over tokens or images. `labels` [batch, seq] are what each position shall say: the next tokens, already shifted, or the masked ones; of
    an image [batch, 1] its class. An encoder reads as many tokens as the decoder. Raises GraphError when a size is not a whole number of 1 or more, the
    sequence is longer than the learned positions, or not that of the image.
    """
    _check_sizes(c, name, batch, seq)
    write = _Model(c, Builder(name), dtype_name(dtype), batch, seq)
    write.head(write.stream())
    return write.b.graph(("loss",))


def _check_sizes(c: ModelConfig, name: str, batch: int, seq: int) -> None:
    for what, value in (("batch", batch), ("seq", seq)):
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_SIZE:
            raise GraphError(f"{what} is {value!r}; it must be a whole number from 1 to {MAX_SIZE}")
    if c.image is not None and seq != c.max_positions:
        raise GraphError(f"seq is {seq}, but `{name}` reads images of {c.image.num_patches} patches behind a class token: its seq is {c.max_positions}")
    if c.learned and seq > c.max_positions:
        raise GraphError(f"seq is {seq}, but `{name}` has {c.max_positions} learned positions; use a seq of {c.max_positions} or less")


class _Model(Writer):
    """Writes a model's embedding, its chains of blocks and its head."""

    def __init__(self, c: ModelConfig, b: Builder, dtype: str, batch: int, seq: int) -> None:
        super().__init__(c, b, batch, seq)
        tokens = (batch, seq)
        inputs = {"source": tokens} if c.encoder else {}
        if c.image is None:
            inputs |= {"ids": tokens}
        else:
            b.tensor("pixels", (batch, c.image.channels, c.image.size, c.image.size), dtype, "input")
        inputs |= {"token_types": tokens} if c.token_types else {}
        inputs |= {"mask": tokens} if c.padding else {}
        inputs |= {"labels": (batch, 1) if c.image else tokens}
        inputs |= {f"labels{i + 2}": tokens for i in range(c.extra_predictions)}
        for name, shape in inputs.items():
            b.tensor(name, shape, "int64", "input")
        for name, p in params(c).items():
            b.tensor(name, p.shape, dtype, "param", p.init)
        self.carried = ""

    # ---- embeddings --------------------------------------------------------------------------------------------------------------------------------

    def embedding(self, ids: str, at: str = "") -> str:
        c = self.c
        x = self._patches() if c.image else self.node("embedding", f"{at}wte", ids, "wte.weight")
        if c.embed_factor != 1.0:
            x = self.node("scale", f"{at}embed.scaled", x, factor=c.embed_factor)
        if c.token_types:
            types = self.node("embedding", "wtt", "token_types", "wtt.weight")
            x = self.node("add", "embed.typed", x, types)
        if c.learned:
            x = self.node("add_positions", "embed", x, self.node("positions", "wpe", "wpe.weight", s=self.seq))
        if c.embed_norm:
            x = self.norm(c.embed_norm, "embed.norm", x)
        return self.dropout(f"{at}embed.drop", x, c.embed_dropout)

    def _patches(self) -> str:
        assert self.c.image is not None
        size = self.c.image.patch
        x = self.linear("patches", self.node("patches", "patches.cut", "pixels", i=size, j=size), True)
        return self.node("prepend", "patches.behind_cls", x, "cls", t=self.seq)

    # ---- the chain ---------------------------------------------------------------------------------------------------------------------------------

    def stream(self) -> list[str]:
        """What the head reads: the stream after the last block, and after each block of an extra prediction."""
        c = self.c
        memory = self._encoder() if c.encoder else None
        self.layer += 1 if c.encoder else 0
        x = self.embedding("ids")
        for i, block in enumerate(c.blocks):
            self.layer = len(c.encoder) + i + 1
            x = self.block(block, f"h.{i}", x, memory, "relative.weight")
            if memory is not None and i + 1 < len(c.blocks):
                memory = self.node("carry", f"h.{i}.memory", memory)
        return self._predictions(x)

    def _encoder(self) -> str:
        c = self.c
        x = self.embedding("source", "enc.")
        for i, block in enumerate(c.encoder):
            self.layer = i + 1
            x = self.block(block, f"enc.h.{i}", x, None, "enc.relative.weight")
        assert c.norm is not None
        return self.dropout("enc.drop", self.norm(c.norm, "enc.ln_f", x), c.embed_dropout)

    def _predictions(self, x: str) -> list[str]:
        """The stream, and that of every extra prediction, each carried through the layers of those behind it."""
        out = [x]
        for i in range(self.c.extra_predictions):
            self.layer += 1
            at, norm = f"mtp.{i}", self.c.blocks[-1].norm
            token = self.node("embedding", f"{at}.wte", f"labels{i + 1}" if i else "labels", "wte.weight")
            parts = [
                self.linear(f"{at}.from_{name}", self.norm(norm, f"{at}.ln_{name}", part), False) for name, part in (("stream", out[-1]), ("token", token))
            ]
            made = self.block(self.c.blocks[-1], f"{at}.h", self.node("add", f"{at}.joined", *parts), None, "")
            out = [*(self.node("carry", f"{at}.carry{j}", y) for j, y in enumerate(out)), made]
        return out

    def block(self, block: Block, at: str, x: str, memory: str | None, table: str) -> str:
        if block.residual in ("parallel", "shared"):
            return self._parallel(block, at, x, table)

        def attend(y: str) -> str:
            return write_attention(self, block.attention, f"{at}.attn", y, table=table)

        x = self._joined(block, at, "1", f"{at}.attn", x, attend)
        if block.cross is not None and memory is not None:
            cross = block.cross
            x = self._joined(block, at, "x", f"{at}.cross", x, lambda y: write_attention(self, cross, f"{at}.cross", y, memory=memory))
        return self._joined(block, at, "2", f"{at}.mlp", x, lambda y: write_mlp(self, block.mlp, f"{at}.mlp", y))

    def _joined(self, block: Block, at: str, which: str, part: str, x: str, f: Part) -> str:
        """A part of a block joined to the stream x: x + f(norm x), norm(x + f x), or x + norm(f(norm x))."""
        norm, before = block.norm, f"{at}.ln_{which}"
        y = self.dropout(f"{part}.drop", f(x if block.residual == "post" else self.norm(norm, before, x)), block.dropout)
        if block.residual == "sandwich":
            y = self.norm(norm, f"{before}_after", y)
        x = self.node("add", f"{part}.residual", x, y)
        return self.norm(norm, before, x) if block.residual == "post" else x

    def _parallel(self, block: Block, at: str, x: str, table: str) -> str:
        y = self.norm(block.norm, f"{at}.ln_1", x)
        z = y if block.residual == "shared" else self.norm(block.norm, f"{at}.ln_2", x)
        y = self.dropout(f"{at}.attn.drop", write_attention(self, block.attention, f"{at}.attn", y, table=table), block.dropout)
        z = self.dropout(f"{at}.mlp.drop", write_mlp(self, block.mlp, f"{at}.mlp", z), block.dropout)
        # attention and MLP first, so that what both leave to be summed is summed once
        return self.node("add", f"{at}.mlp.residual", x, self.node("add", f"{at}.both", y, z))

    # ---- the head ----------------------------------------------------------------------------------------------------------------------------------

    def head(self, streams: list[str]) -> None:
        c = self.c
        self.layer = c.num_layers + 1
        each = self._loss("", streams[0], "ln_f", "labels")
        for i, x in enumerate(streams[1:]):
            extra = self._loss(f"mtp.{i}.", x, f"mtp.{i}.ln_f", f"labels{i + 2}")
            weighed = self.node("scale", f"mtp.{i}.loss.weighed", extra, factor=c.extra_weight / c.extra_predictions)
            each = self.node("add", f"mtp.{i}.loss.sum", each, weighed)
        if self.load:
            each = self.node("add", "loss.balanced", each, self._balance())
        num_terms = self.batch * (1 if c.image else self.seq)
        self.node("total", "loss", each, factor=1.0 / num_terms)

    def _balance(self) -> str:
        """The balancing loss of all layers' experts, the same for every token."""
        kinds = [block.mlp for block in self.c.blocks if isinstance(block.mlp, Experts)]
        num_tokens = self.batch * self.seq * len(kinds)
        factor = self.c.balance * kinds[0].num_experts * kinds[0].top_k / num_tokens**2
        return self.node("spread", "loss.balance.each", self.node("balance", "loss.balance", *self.load, factor=factor), b=self.batch, s=self.seq)

    def _loss(self, at: str, x: str, norm: str, labels: str) -> str:
        """The loss of every position. Cross-entropy in the form in which the vocabulary may lie on several ranks."""
        logits = self._logits(at, x, norm)
        top = self.node("last_max", f"{at}loss.top", logits)
        z, t = self.b.node("exp_sum", (logits, labels, top), name=f"{at}loss.sums", outputs=(f"{at}loss.z", f"{at}loss.t"), layer=self.layer)
        return self.node("log_loss", f"{at}loss.each", z, t)

    def _logits(self, at: str, x: str, norm: str) -> str:
        c = self.c
        if c.norm:
            x = self.norm(c.norm, norm, x)
        if c.encoder:
            x = self.dropout("ln_f.drop", x, c.embed_dropout)
        if c.image:
            x = self.node("pick", "head.cls", x, t=1)
        if c.head_activation:
            x = self.activation("head.act", c.head_activation, self.linear("head", x, True))
            x = self.norm(c.blocks[-1].norm, "head.norm", x)
        if c.logit_factor != 1.0:
            x = self.node("scale", "head.scaled", x, factor=c.logit_factor)
        logits = self.node("linear_t", f"{at}lm_head", x, "wte.weight" if c.tied else "lm_head.weight")
        if c.head_bias:
            logits = self.node("bias", f"{at}lm_head.add_bias", logits, "lm_head.bias")
        return self.node("softcap", f"{at}lm_head.capped", logits, cap=c.softcap) if c.softcap else logits


__all__ = ["build", "num_params", "params", "salt"]
