"""RocksDB: the engine, and readers of its files for checks and salvage."""
