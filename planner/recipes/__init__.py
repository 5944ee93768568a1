"""Runs as frameworks describe them, and the seconds of their step in closed form.

`run` what was run and what was measured, `rows` published tables read as runs.
"""
