"""What every long-running part is built from: stages, tasks, shutdown, heartbeats, deadlines, leases on devices."""
