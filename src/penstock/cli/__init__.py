"""The commands of the command line. Each module has a mapping ``commands``, by name."""
