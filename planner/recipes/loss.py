"""Memory and relative time of the logits and the loss, by how it is computed.

| mode | bytes a logit | time over eager |
|---|---|---|
| `eager` | logits in 16 bits and in float32 | 1 |
| `fused`, vocabulary-parallel in one kernel | the same, and the gradient in float32 beside | 0.7 |
| `chunked`, head and loss together over chunks of the tokens | those of one chunk | 2.2: the head runs again in the backward |

Figures: NovaSky-AI/SkyRL PR 1841, logits of 62,080 of 248,320 entries on 8,192 to 262,144 tokens; there a chunk has 1,024 tokens.
"""

from __future__ import annotations

from ir.errors import InputError

LOGIT_BYTES = {"eager": 6.0, "fused": 10.0, "chunked": 10.0}
"""Bytes of a logit while the loss is computed: 2 + 4, and + 4 for a gradient of its own."""

TIMES = {"eager": 1.0, "fused": 0.7, "chunked": 2.2}
"""Time over that of the eager loss, the head's product included."""

CHUNK_TOKENS = 1024
HIDDEN_BYTES = 2.0
BASE_BYTES = 0.25 * 2**30
"""What the process holds beside the logits, in the same measurement."""


def loss_bytes(mode: str, tokens: int, vocab: int, hidden: int = 0, base_bytes: float = 0.0) -> float:
    """Bytes of the loss over `tokens` with `vocab` entries on this rank. Chunked, the gradient of the hidden states (`hidden` elements a token) is kept too.

    >>> round(loss_bytes("eager", 8192, 248_320) / 2**30, 1)
    11.4
    """
    if mode not in LOGIT_BYTES:
        raise InputError(f"no loss is called `{mode}`; known are {', '.join(LOGIT_BYTES)}")
    rows = min(tokens, CHUNK_TOKENS) if mode == "chunked" else tokens
    kept = HIDDEN_BYTES * hidden * tokens if mode == "chunked" else 0.0
    return LOGIT_BYTES[mode] * rows * vocab + kept + base_bytes
