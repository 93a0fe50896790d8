"""HTTP/1.1: a listener, the protocol, and which requests are refused before they are read."""
