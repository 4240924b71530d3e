"""The loops that scripts train in: federated rounds, also as functions, and DiLoCo."""
