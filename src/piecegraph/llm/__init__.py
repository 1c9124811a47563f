"""Language models of transformers, run as they are through the tape: paged cache, continuous batching, sampling."""
