"""Penstock in the frameworks that people use already."""
