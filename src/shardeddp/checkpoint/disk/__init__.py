"""Files and directories that a crash cannot tear."""
