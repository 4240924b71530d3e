"""The round machine of a run: rules, states, events and effects, without IO and without a clock."""
