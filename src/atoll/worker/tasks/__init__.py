"""Tasks at a site: the handlers that answer a workflow's tasks, and the evaluation of models on the site's data."""
