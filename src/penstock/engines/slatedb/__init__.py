"""SlateDB on object storage or a directory: the engine, readers beside it, checks and salvage."""
