"""Performs a Program for real; needs numpy and networkx only, on GPUs cupy too.

In the order of their work: `blas` (threads of the BLAS), `backend` with `numpy_backend`, `cupy_backend`, `null_backend` and `backends` (arrays and streams),
`data` (what is trained on), `buffers` (registers in memory), `slots` (which of them a firing meets), `transport` and `threads` (collectives and p2p), `bind`
(one callable an actor), `marks` (order on a device that runs behind), `driver` (threads on a Machine), `measured` (the timeline), `train` (a run and its
results), `checkpoint`, `verify`; `together`, `samples`, `exchange` and `measure` (the cluster `local`), `gpu_check`; `cli`.
"""
