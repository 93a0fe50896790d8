"""The contract on a key-value engine: RocksDB, SlateDB or memory."""
