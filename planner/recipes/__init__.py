"""Runs as frameworks describe them, and the seconds of their step in closed form.

`run` what was run and what was measured, `rows` published tables read as runs; `release` what a framework's release does, `works` what a layer consists of,
`bill` what it costs, `shares` what is fitted, `step` the seconds of a step, `timetable` those of every pass; `study` what is fitted to what, `fit` how,
 `learn` what is found, `level` what one run tells of others; `states`, `saved` and `memory` what its ranks hold, `loss` and `flops` figures of the head
 and of utilisation, `kv` and `serve` of serving; `estimate` a run's seconds and band, `validate` tables of runs, `accuracy` the page about it.
"""
