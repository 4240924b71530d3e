"""Workflows at the server: tasks, their payloads and answers, and cross-site evaluation."""
