"""A server of several processes: one runs the model's steps, and others speak HTTP.

Note [API processes]
~~~~~~~~~~~~~~~~~~~~
Python runs one thread at a time, and the step loop needs it for a fraction of every step. Templates, tokenizing, text,
parsing, events and sockets take several times as much of it for each token. So they are done by API processes, each
with the same application as a server of one process, over a :class:`~piecegraph.serve.catalog.Catalog` that asks the
engine's process. What passes between is tokens: one message a step and process, with all that is new (``link.py``,
``wire.py``).

The engine's process is the one that was started. It holds the listening sockets, one for each API process, among which
the system shares out connections; starts API processes, and again if one ends; and has all that there is one of:
models, queues, counters. An API process that goes takes its connections with it, and its requests are ended. When the
engine's process goes, API processes see their link end, tell their clients, and go, too.
"""
