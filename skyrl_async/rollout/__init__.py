"""What turns prompts into finished groups: admission, workers, retries, the buffer, staleness policies."""
