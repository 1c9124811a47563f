"""Who put a kernel into a graph, or launched it: found at capture and in profiles, shown in tables and groups."""
