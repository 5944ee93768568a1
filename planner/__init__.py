"""What to do: from a model and a cluster to the best plans, and from a plan to a Program."""
