"""The coordinator: it records decisions, admits sites and updates, and has rounds aggregated."""
