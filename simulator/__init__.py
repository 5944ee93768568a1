"""How long a Program takes, and how much memory."""
