"""Performs a Program for real; needs numpy and networkx only, on GPUs cupy too."""
