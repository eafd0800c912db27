"""A whole refit on one machine: a trainer, generators and a control plane, in real processes."""
