"""Migrations of the table of tasks."""
