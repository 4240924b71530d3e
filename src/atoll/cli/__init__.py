"""The command `atoll`: a file for each subcommand, and the templates from which `atoll new` makes scripts."""
