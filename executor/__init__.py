"""Performs a Program for real; needs numpy and networkx only, on GPUs cupy too.

In the order of their work: `blas` (threads of the BLAS), `backend` with `numpy_backend`, `cupy_backend`, `null_backend` (arrays and streams), `data` (what is
trained on), `buffers` (registers in memory), `transport` and `threads` (collectives and p2p), `bind` (one callable an actor), `driver` (threads on a Machine),
`train` (a run and its results), `checkpoint`, `verify`, `measure`, `gpu_check`, `cli`.
"""
