"""Several processes run one model: who they are, what they send each other, and how they end together."""
