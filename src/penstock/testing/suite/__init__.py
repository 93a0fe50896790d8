"""The parts of the conformance suite, one module for each side of the contract."""
