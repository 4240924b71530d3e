"""The round machine: the state machine of a run's rounds, with its rules, states and events, without IO or a clock."""
