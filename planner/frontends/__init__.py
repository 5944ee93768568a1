"""From what a user has (a zoo name, a config) to a Graph."""
