"""What tests and benchmarks need of the machine: processes, a broken network, hundreds of workers, schedules."""
