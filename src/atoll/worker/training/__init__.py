"""The training loops of a worker: federated rounds (`atoll.join`), the same as plain functions, and DiLoCo."""
