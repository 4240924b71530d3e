"""Tasks at a site: call the handlers for the tasks of workflows, and evaluate models on the site's data."""
