"""Why a run failed, on one page: from its logs, from its own records, or from what its ranks tell each other."""
