"""The command `atoll`: one file for each subcommand, and the scripts that `atoll new` copies."""
