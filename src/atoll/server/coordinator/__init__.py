"""The coordinator: it lets sites join, accepts or refuses updates, records decisions, and aggregates rounds."""
