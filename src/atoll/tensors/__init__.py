"""Tensors of models, updates and payloads: schemas, layouts of files, dtypes and custom types."""
