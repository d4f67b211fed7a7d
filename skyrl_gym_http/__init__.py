"""skyrl_async: a fully asynchronous RL trainer for language-model agents."""
