"""The collectives of every axis: one `Group`, the ring under it, and the ledger."""
