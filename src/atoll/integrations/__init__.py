"""Atoll inside other people's training loops; one file a framework, none of which is imported by anything else."""
