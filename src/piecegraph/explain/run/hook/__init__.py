"""The recorder that ``piecegraph run`` puts into every Python process of a command.

``run`` copies this folder into a private one that is first on the ``PYTHONPATH`` of the command, and
``sitecustomize.py`` beside it. In goes whatever ends the process or is printed by it; out come one JSON file for the
process, one file of raw stacks that ``faulthandler`` writes to, and one of the last lines that it printed.

It runs inside programs that know nothing of it, so: only the standard library, any Python from 3.9 on, nothing heavy
imported before a failure, no reference kept to an exception (its frames may hold gigabytes), and an error in here is
swallowed. The one invariant: what the program prints and how it ends are what they would be without it.
"""
