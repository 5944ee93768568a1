"""The words that every part of headrace speaks: standard library, numpy and networkx only; no clock, no device, no solver.

In the order in which a model passes through them: `errors`, `units`, `random`, `sbp`, `mesh`, `op` and `ops/`, `graph`, `boxing`, `cluster`, `work`, `plan`,
`program` and `program_text`; `net`, `story`, `proof` and `machine`: what a program means; `timeline` with `timed`, `intervals`, `breakdown`, `classes`,
`communication`, `diff`, `live` and `trace`: what a performance of it says.
"""
