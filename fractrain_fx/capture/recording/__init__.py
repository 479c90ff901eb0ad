"""Record one real run call by call, and decide which modules stay one node."""
