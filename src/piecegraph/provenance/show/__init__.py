"""How a table, a diff and groups become text, Markdown, CSV, JSON, and a file for Perfetto."""
