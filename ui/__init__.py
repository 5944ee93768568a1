"""The page and the figures: the same verbs as the command, to be looked at.

In processing order: `question` (what is asked, and what the verbs answer), `bars` (spans to as many bars as an eye can tell apart), `charts` (values to
figures, without Streamlit), `app` (the page), `launch` (starts it).
"""
