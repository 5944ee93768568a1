"""How long it takes: clusters and their profiles, costs, and the event simulation of a Program.

`profile` (bundled figures), `clusters` (names to Cluster), `routes` (paths of the topology), `collectives` (alpha-beta on it), `gemm` (rates by shape),
`cost` (Work to seconds), `contention` (what is shared), `engine` (Program to Timeline), `fold` (ranks that do the same), `memory` (the ledger),
`estimate` (closed forms and lower bounds).
"""

