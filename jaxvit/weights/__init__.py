"""From a checkpoint's files to canonical parameters."""
