"""What to do: from a model and a cluster to the best plans, and from a plan to a Program.

In the order in which a model passes through them: `frontends/`; `schedules/`, `orders`, `stages`, `candidates`, `bounds` and `footprint`: the outer space;
`facts`, `space`, `pricing`, `tables`, `problem`, `elimination` and `placement`: the placement of one candidate; `autodiff`, `place`, `elide`, `arena` and
`lower`: from a plan to its Program; `folding`, `stage_costs`, `pipeline_costs` and `drafts`: what a candidate costs, told by few of its layers; `summary`,
`foretell` and `evaluate`: what it is worth; `ways_out`, `reasons` and `search`: the best of all; `explain`;
`check` and `single`: whether a plan is legal, and the plan of one device. Beside them `recipes/`: runs as frameworks describe them, in closed form.
"""
