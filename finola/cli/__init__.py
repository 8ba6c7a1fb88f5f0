"""The command line: one file or folder a command, and what commands share."""
