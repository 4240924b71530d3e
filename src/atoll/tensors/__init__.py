"""Tensors of models and messages: their names and dtypes, their place in files, and their conversion to bytes."""
