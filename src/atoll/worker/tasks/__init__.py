"""Tasks of workflows at a site: its handlers, and evaluations of models on its data."""
