"""Several processes that serve one data port: the `supervisor` starts them, each has its `place`, and the first one
speaks for all (`crew`, `samples`)."""
