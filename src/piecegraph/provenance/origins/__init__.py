"""Where in the user's model the code of a step comes from: nodes of FX graphs, lines of Inductor's wrappers."""
