"""What to do: from a model and a cluster to the best plans, and from a plan to a Program.

In the order in which a model passes through them: `frontends/`; `schedules/`, `orders`, `stages`, `candidates`, `bounds` and `footprint`: the outer space.
The placement of one candidate: `facts`, `space`, `hints`, `imports`: what may be chosen; `pricing`, `tables`, `costs`, `runs`, `problem`: what it costs;
`solver/`: the least of it; `placed`, `placement`: the answer; `trade`, `fronts`, `mix`, `within`: within how many bytes. From a plan to its Program:
`autodiff`, `sites`, `place`, `optimizers`, `owners`, `ending`, `elide`, `arena`, `stack`, `inplace`, `lower`. The best of all: `folding`, `stage_costs`,
`pipeline_costs`, `drafts`: what a candidate costs, told by few of its layers; `summary`, `foretell`, `evaluate`: what it is worth; `ways_out`, `reasons`,
`search`. Why it is what it is: `words`, `reshards`, `signatures`, `compare`, `explain`. `check` and `single`: whether a plan is legal, and the plan of one
device. Beside them `recipes/`: runs as frameworks describe them, in closed form.
"""
