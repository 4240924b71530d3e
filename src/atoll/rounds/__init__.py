"""The round machine of a run: its rules, states, events and effects, without IO and without a clock."""
