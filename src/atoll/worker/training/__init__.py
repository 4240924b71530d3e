"""The training loops of a worker: federated rounds (`atoll.join`), federated rounds as plain functions, and DiLoCo."""
