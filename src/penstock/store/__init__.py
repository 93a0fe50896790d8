"""The contract's storage designs."""
