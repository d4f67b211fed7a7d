"""Datasets, the ledger of uids, the async dataloader."""
