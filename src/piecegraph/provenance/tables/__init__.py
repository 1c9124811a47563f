"""Launches as rows of a table, and what changed from one table to another."""
