"""The native protocol: a listener, its connections, and what each request does."""
