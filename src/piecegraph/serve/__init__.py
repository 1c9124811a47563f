"""A language model behind an address: the HTTP server of ``piecegraph serve``. It needs the extra ``serve``."""
