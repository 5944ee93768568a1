"""What to do: from a model and a cluster to the best plans, and from a plan to a Program.

In the order of use: `frontends` (models to graphs); `facts`, `pricing`, `tables`, `space`, `problem`, `elimination`, `placement` (the cheapest placement of one
layout); `candidates`, `stages`, `bounds`, `evaluate`, `search` (the best layouts); `schedules`, `orders`, `check`, `autodiff`, `place`, `elide`, `arena`,
`lower` (a plan written out as a Program); `single` (the plan of one device), `summary`, `reasons`, `explain` (a plan in words).
"""
