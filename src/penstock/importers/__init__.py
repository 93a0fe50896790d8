"""Bringing other queues' databases in. Each importer is a module of its own, loaded when used."""
