"""The advantage estimators, one short file each."""
