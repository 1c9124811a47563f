"""Which line launched this kernel: traces, tables and groups of kernels."""
