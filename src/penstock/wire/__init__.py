"""Wire protocols, pure: bytes in, values out, and back. Sockets and brokers are for others."""
