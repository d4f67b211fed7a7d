"""The run's configuration: documented structured configs, their rules, and the one place that loads them."""
