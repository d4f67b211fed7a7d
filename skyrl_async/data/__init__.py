"""Layer 2: datasets, the ledger of uids, the async dataloader."""
