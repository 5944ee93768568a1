"""The least of a sum of tables over pairs of choices, exactly, whatever it means.

`factors` its problem, `gathered` its tables, `dominance` and `reductions` what shrinks it without loss, `blocks` and `chain` repeated parts folded,
`diffusion` costs moved until bounds are tight, `polytope` the linear and the integer program of what is left, `elimination` all of them in order; `marginals`
what every state costs with all else at its best.
"""
