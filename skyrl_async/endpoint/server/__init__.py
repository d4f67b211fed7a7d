"""The application, the processes that serve it, and forwarding between them."""
