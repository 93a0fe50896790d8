"""The native protocol: msgpack frames between Penstock's own client and server."""
